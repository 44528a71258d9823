"""One prompt through a prefill and a decode worker, as a gateway would send it: real blocks, really moved."""

from __future__ import annotations

import asyncio
import random
import secrets
import time
from typing import NamedTuple

import grpc

from baton.protocol import INSTANCE_BYTES, PROTOCOL
from baton.service.codec import budget_ms
from baton.v1 import kv_pb2, worker_pb2_grpc
from baton.v1 import worker_pb2 as pb
from kvtransfer.naming import HASH_BYTES, SpanHash, chain_hashes

_NUM_TOKENS = 2048  # at most; whole contexts of a small model


class HandoverFailed(Exception):
    """One line: which worker said what."""


class Handover(NamedTuple):
    transport: str
    num_tokens: int
    num_bytes: int
    transfer_s: float
    ttft_s: float  # from the first command to the first token
    token_ids: tuple[int, ...]


class Session:
    """A worker's session as a client of it. `async with`."""

    def __init__(self, channel: grpc.aio.Channel, address: str):
        self.address = address
        self._stub = worker_pb2_grpc.WorkerStub(channel)

    async def __aenter__(self) -> Session:
        self._call = self._stub.Session()
        hello = pb.Hello(protocol_min=PROTOCOL, protocol_max=PROTOCOL, instance=secrets.token_bytes(INSTANCE_BYTES))
        await self._call.write(pb.Command(hello=hello))
        self.hello = (await self._read()).hello
        return self

    async def __aexit__(self, *exc) -> None:
        self._call.cancel()

    async def send(self, **command) -> None:
        await self._call.write(pb.Command(**command))

    async def expect(self, kind: str, key: pb.Key):
        """The next event of this kind of this key. Raises HandoverFailed when the key is refused or ends first."""
        while True:
            event = await self._read()
            name = event.WhichOneof("kind")
            message = getattr(event, name)
            if key not in getattr(message, "keys", [getattr(message, "key", None)]):
                continue  # of a handover before
            if name == kind:
                return message
            if name == "refused":
                raise HandoverFailed(f"{self.address} refuses it: {message.reason}")
            if name == "ended":
                raise HandoverFailed(f"{self.address} ends it: {message.message or message.reason}")

    async def _read(self) -> pb.Event:
        event = await self._call.read()
        if event is grpc.aio.EOF:  # pyright: ignore[reportAttributeAccessIssue]
            raise HandoverFailed(f"{self.address} closed the session")
        return event


async def hand_over(prefill: Session, decode: Session, transport: str | None, timeout_s: float = 60.0) -> Handover:
    """Prefill there, decode two tokens here; all KV is written before it is fetched, so that the rate is the
    transport's. `transport` None: the decode worker chooses. Raises HandoverFailed, TimeoutError, AioRpcError."""
    async with asyncio.timeout(timeout_s):
        return await _hand_over(prefill, decode, transport, time.monotonic() + timeout_s)


async def _hand_over(prefill: Session, decode: Session, transport: str | None, deadline: float) -> Handover:
    key = pb.Key(request_id=f"doctor-{secrets.token_hex(8)}", attempt=1)
    spec = _spec(prefill.hello, decode.hello, deadline)
    begun = time.monotonic()
    try:
        await decode.send(admit=pb.Admit(key=key, spec=spec))
        await decode.expect("granted", key)
        await prefill.send(prefill=pb.Prefill(key=key, spec=spec, taker=_taker(decode.hello)))
        accepted = await prefill.expect("accepted", key)
        done = await prefill.expect("done", key)
        ttft_s = time.monotonic() - begun
        await decode.send(fetch=pb.Fetch(key=key, handle=_only(accepted.handle, transport), ticket=accepted.ticket))
        fetched = await decode.expect("fetched", key)
        await decode.send(start=pb.Start(key=key, first_tokens=done.first_tokens))
        output = await decode.expect("step_output", key)
    finally:
        for session in (prefill, decode):
            await session.send(cancel=pb.Cancel(key=key))
    token_ids = (done.first_tokens[0].token_id, *output.token_ids)
    return Handover(fetched.transport, fetched.num_tokens, fetched.num_bytes, fetched.transfer_s, ttft_s, token_ids)


def _spec(prefill: pb.Hello, decode: pb.Hello, deadline: float) -> pb.RequestSpec:
    """Return new tokens under a root of their own, so that no cache answers instead of the transport."""
    room = min(prefill.limits.max_model_len, decode.limits.max_model_len) - 8
    token_ids = random.choices(range(min(prefill.model.vocab_size, decode.model.vocab_size)), k=min(room, _NUM_TOKENS))
    root = SpanHash(secrets.token_bytes(HASH_BYTES))
    hashes = chain_hashes(root, token_ids)
    return pb.RequestSpec(
        token_ids=token_ids,
        num_prompt_tokens=len(token_ids),
        span_hashes=hashes,
        chain_parent=hashes[-1] if hashes else root,
        sampling=pb.WorkerSampling(top_p=1.0, repetition_penalty=1.0, n=1),
        max_tokens=2,
        budget_ms=budget_ms(deadline),
    )


def _taker(hello: pb.Hello) -> kv_pb2.Taker:
    return kv_pb2.Taker(
        instance=hello.instance,
        epoch=hello.epoch,
        layout=hello.layout,
        numerics_class=hello.numerics_class,
        transports=hello.model.transports,
        host_id=hello.host_id,
    )


def _only(handle: bytes, transport: str | None) -> bytes:
    """The handle with the endpoints of one transport."""
    if transport is None:
        return handle
    message = kv_pb2.KVHandle.FromString(handle)
    for part in message.parts:
        kept = [endpoint for endpoint in part.endpoints if endpoint.transport == transport]
        del part.endpoints[:]
        part.endpoints.extend(kept)
    return message.SerializeToString()
