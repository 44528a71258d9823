"""Prefixes that workers offer each other."""

from baton.v1 import worker_pb2 as pb
from tests.support.worker.scripted import Session


async def offered_prefix(pair, spec, num_spans: int, session: Session) -> pb.KVSource:
    """Return what the worker of `session`, which has read the prompt, offers to the prefill worker: the first spans."""
    hello, key = pair.prefill.hello, pb.Key(request_id="offer")
    taker = pb.Offer().taker
    taker.MergeFrom(type(taker)(
        instance=hello.instance, epoch=hello.epoch, layout=hello.layout, numerics_class=hello.numerics_class,
        transports=hello.model.transports, host_id=hello.host_id,
    ))  # fmt: skip
    chain = pb.SpanChain(hashes=spec.span_hashes[:num_spans])
    await session.send(offer=pb.Offer(key=key, spans=chain, taker=taker, budget_ms=9000))
    offered = await session.next("offer", "offered")
    return pb.KVSource(handle=offered.handle, ticket=offered.ticket)


async def generate_with_sources(pair, spec, sources):
    """Return the first tokens of a prompt whose prefix is pulled from `sources`, Done and Fetched."""
    key = pb.Key(request_id="turn2")
    await pair.decode.send(admit=pb.Admit(key=key, spec=spec))
    await pair.decode.next("turn2", "granted")
    await pair.prefill.send(prefill=pb.Prefill(key=key, spec=spec, taker=pair.taker(), sources=sources))
    accepted = await pair.prefill.next("turn2", "accepted")
    await pair.decode.send(fetch=pb.Fetch(key=key, handle=accepted.handle, ticket=accepted.ticket))
    done = await pair.prefill.next("turn2", "done")
    fetched = await pair.decode.next("turn2", "fetched")
    for session in (pair.prefill, pair.decode):
        await session.send(cancel=pb.Cancel(key=key))
        await session.wait_idle()
    return [first.token_id for first in done.first_tokens], done, fetched
