"""The registry's view of fleets that are larger than what a request looks at."""

import hashlib
from collections import Counter
from pathlib import Path
from types import MappingProxyType

import pytest

from baton.service.clock import now
from baton.service.errors import Unavailable
from baton.v1 import worker_pb2 as pb
from gateway.config.settings import GatewaySettings
from gateway.fleet import candidates
from gateway.fleet.registry import Registry
from gateway.fleet.router import Exclusions
from gateway.link.mailbox import Mailbox
from gateway.link.worker_link import LinkState, WorkerLink
from gateway.model.model_folder import Defaults, ModelFolder
from gateway.prefix.memory_index import MemoryIndex
from gateway.prefix.prefix_matches import Matches, WorkerBits
from gateway.routing.latency_model import Pace
from gateway.routing.routing import NUM_DRAWN, NUM_HOLDERS, Candidate, RoutingRequest

FOLDER = ModelFolder(Path("/m"), "m", 4096, 1000, frozenset(), Defaults(), b"", b"", None, {})
ASK = RoutingRequest(2000, 2001)


def fleet(num: int, split: str = "always", transports=("tcp",), **fields) -> Registry:
    """`num` workers of each role, one of each on a host."""
    addresses = [f"127.0.0.1:{port}" for port in range(1, 2 * num + 1)]
    settings = GatewaySettings(
        model=Path("/m"),
        split=split,
        prefill_workers=tuple(addresses[:num]),
        decode_workers=tuple(addresses[num:]),
        **fields,
    )
    registry = Registry(settings, MemoryIndex(), b"secret")
    registry.add(FOLDER)
    for i, link in enumerate(registry.links):
        serve(link, f"host{i % num}", transports, role="prefill" if i < num else "decode")
    return registry


def held(num_spans: dict[bytes, int]) -> Matches:
    """Return the matches of an index with these spans."""
    workers = dict(enumerate(num_spans))
    longest = max(num_spans.values(), default=0)
    bits = (sum(1 << i for i, id in workers.items() if num_spans[id] > at) for at in range(longest))
    return Matches(bits, WorkerBits.of(workers))


def serve(
    link: WorkerLink, host: str, transports=("tcp",), role: str = "prefill", adapters=MappingProxyType({})
) -> None:
    """`adapters`: a byte of the identity, by name."""
    hello = pb.Hello(
        instance=hashlib.sha256(link.address.encode()).digest()[:16],
        epoch=1,
        roles=[role],
        host_id=host,
        limits=pb.Limits(max_model_len=4096, max_num_seqs=64, block_size=16),
        kv_gives=["kv"],
        kv_takes=["kv"],
        model=pb.ModelCard(transports=transports, vocab_size=1000),
        kv_token_bytes=1000,
        adapters=[pb.Adapter(name=name, identity=bytes([byte] * 32)) for name, byte in adapters.items()],
    )
    assert link._on_hello(link, hello) is None
    link.note_hello(hello)
    link._become(LinkState.SERVING, "")


def test_a_prefix_counts_in_whole_steps_between_checkpoints():
    registry = fleet(1)
    link = registry.links[0]
    for step, expected in ((0, 576), (64, 576), (512, 512), (1024, 0)):
        hello = pb.Hello()
        hello.CopyFrom(link.hello)
        hello.checkpoint_tokens = step
        link.note_hello(hello)
        registry.fleets[0].candidates._facts.clear()
        (seen,) = registry.fleets[0].candidates.as_candidates([link], held({link.worker_id: 9}))
        assert seen.num_matched_tokens == expected


def test_the_holder_is_found_among_many():
    registry = fleet(300)
    holder = registry.prefill[217]
    matches = held({link.worker_id: 1 for link in registry.links} | {holder.worker_id: 21})
    for _ in range(3):
        assert registry.fleets[0].router.route(ASK, matches).prefill is holder
        assert registry.fleets[0].router.route(ASK, matches, Exclusions({holder.worker_id})).prefill is not holder
    reader = next(link for link in registry.prefill if link is not holder)
    assert registry.fleets[0].router.holder_for(reader, matches, ()) is holder
    assert registry.fleets[0].router.holder_for(holder, matches, ()) is None


def test_a_request_looks_at_few(monkeypatch):
    registry, looked = fleet(300), []
    seen = registry.fleets[0].candidates.as_candidates
    monkeypatch.setattr(
        registry.fleets[0].candidates,
        "as_candidates",
        lambda links, *rest: looked.append(len(links)) or seen(links, *rest),
    )
    registry.fleets[0].router.route(ASK, held({link.worker_id: 1 for link in registry.links}))
    assert len(looked) == 2 and max(looked) <= NUM_HOLDERS + NUM_DRAWN


def test_the_only_partner_is_found_among_many():
    """KV goes through shared memory alone, so that each decode worker has one prefill worker."""
    registry = fleet(200, transports=("shm",))
    for _ in range(10):
        _, source, taker = registry.fleets[0].router.route(ASK, Matches())
        assert source.hello.host_id == taker.hello.host_id


def test_who_serves_no_longer_is_not_chosen():
    registry = fleet(2)
    first, second = registry.prefill
    registry.decode[0]._become(LinkState.DRAINING, "draining")
    first._become(LinkState.CONNECTING, "gone")
    assert registry.not_ready() is None
    _, source, taker = registry.fleets[0].router.route(ASK, Matches())
    assert source is second and taker is registry.decode[1]
    second._become(LinkState.STALLED, "stalled")
    assert "no prefill worker" in registry.not_ready()
    with pytest.raises(Unavailable):
        registry.fleets[0].router.route(ASK, Matches())
    serve(first, "host0")
    assert registry.not_ready() is None and registry.fleets[0].router.route(ASK, Matches()).prefill is first


@pytest.mark.parametrize("settings", [{}, {"split": "auto"}, {"split": "auto", "stand_in": True}])
def test_why_no_two_workers_are_a_pair_is_told_once(caplog, settings):
    """The gateway was not ready, or a prefill worker had nothing to do, for ever and without a line."""
    registry = fleet(1, **settings)
    (source,), (taker,) = registry.prefill, registry.decode
    assert not caplog.records and registry.not_ready() is None
    serve(taker, "host0", ("shm",), role="decode")
    why = f"{source.address} > {taker.address}: no transport in common that carries it: tcp and shm"
    (record,) = caplog.records
    assert record.levelname == "WARNING" and why in record.getMessage()
    if not settings:
        assert registry.not_ready() == f"no prefill worker serves that a decode worker can take KV from: {why}"
    serve(source, "host0", ("tcp",))
    assert len(caplog.records) == 1, "it has said the same again"
    serve(source, "there", ("shm",))
    assert "no transport in common that carries it, to another host: shm and shm" in caplog.records[1].getMessage()
    serve(source, "host0", ("shm",))
    assert len(caplog.records) == 2 and registry.not_ready() is None
    taker.hello.kv_takes[:] = ["of another class"]
    taker._become(LinkState.CONNECTING, "again")
    taker._become(LinkState.SERVING, "")
    assert "or with --strict-numerics another numerics class" in caplog.records[2].getMessage()


def test_where_nothing_is_split_no_two_workers_need_be_a_pair(caplog):
    registry = fleet(1, split="never")
    serve(registry.decode[0], "host0", ("shm",), role="decode")
    assert not caplog.records and registry.not_ready() is None


def test_work_that_was_given_is_spread():
    """A worker without measurements is not given all new requests at once."""
    registry, chosen = fleet(4), []
    for _ in range(40):
        decision, source, _ = registry.fleets[0].router.route(ASK, Matches())
        source.recent_load.add(decision.prefill_s, now())
        chosen.append(source)
    assert {chosen.count(link) for link in registry.prefill} == {10}


@pytest.mark.parametrize("role", ["prefill", "decode"])
def test_the_few_that_can_hold_a_long_request_are_found_among_many(role):
    """Three of 120, of which a request looks at sixteen; with any of them avoided, and any holding the prefix."""
    registry, ask = fleet(120, split="auto"), RoutingRequest(8000, 8400)
    links = getattr(registry, role)
    long, other = links[7::40], registry.decode if role == "prefill" else registry.prefill
    for link in (*long, *other):
        hello = link.hello
        hello.limits.max_model_len = 8500
        link._become(LinkState.CONNECTING, "again")
        link.note_hello(hello)
        link._become(LinkState.SERVING, "")
    matches = held({link.worker_id: 1 for link in links})
    for avoid in ((), {long[0].worker_id}, {link.worker_id for link in links}):
        for _ in range(20):
            _, source, taker = registry.fleets[0].router.route(ask, matches, Exclusions(avoid))
            assert taker.limits.max_model_len == 8500 and (source is None or source.limits.max_model_len == 8500)
            assert (
                role == "decode"
                or registry.fleets[0].router.prefill_for(taker, ask, matches, Exclusions(avoid)) in long
            )
            if avoid == {long[0].worker_id}:
                assert long[0] not in (source, taker)
    assert registry.fleets[0].router.has_worker(
        role, ask, exclude={link.worker_id for link in long[1:]}, trusted_only=True
    )
    assert not registry.fleets[0].router.has_worker(
        role, ask, exclude={link.worker_id for link in long}, trusted_only=True
    )


def test_what_a_worker_can_never_take_is_split_as_the_settings_say_elsewhere():
    registry, short = fleet(2), RoutingRequest(40, 60)  # which `auto` reads where it decodes
    router = registry.fleets[0].router
    for link in (registry.decode[0], registry.prefill[0]):
        _, source, taker = router.route(short, Matches(), Exclusions(unable={link.worker_id}))
        assert source is not None and link not in (source, taker)
    assert (
        router.route(short, Matches(), Exclusions(unable={link.worker_id for link in registry.prefill})).prefill is None
    )
    for link in registry.prefill:
        link._become(LinkState.CONNECTING, "gone")
    with pytest.raises(Unavailable, match="no prefill worker"):
        router.route(short, Matches(), Exclusions(unable={registry.decode[0].worker_id}))


def test_what_a_worker_can_never_take_is_not_split_elsewhere_where_nothing_is():
    registry = fleet(2, split="never")
    for link in registry.decode:
        link.load = pb.Load(num_running=50)  # so that `auto` would
    _, source, taker = registry.fleets[0].router.route(
        ASK, Matches(), Exclusions(unable={registry.decode[0].worker_id})
    )
    assert source is None and taker is registry.decode[1]


def test_every_field_of_a_candidate_has_its_own_value():
    """They are given by position, three sets of words in a row."""
    registry = fleet(1, transports=("shm",))
    (link,), hello = registry.decode, pb.Hello()
    hello.CopyFrom(link.hello)
    hello.kv_gives[:], hello.kv_takes[:] = ["given"], ["taken"]
    link.note_hello(hello)
    link.load = pb.Load(num_running=3, num_waiting=4, num_waiting_tokens=50, num_blocks_total=9, num_blocks_free=6)
    registry.fleets[0].candidates._facts.clear()
    (found,) = registry.fleets[0].candidates.as_candidates([link], held({link.worker_id: 2}))
    assert found._replace(utilization=0.0) == Candidate(
        name=link.address,
        num_matched_tokens=128,
        num_sequences=7,
        num_waiting_tokens=50,
        limits=link.limits,
        kv_gives=frozenset(["given"]),
        kv_takes=frozenset(["taken"]),
        transports=frozenset(["shm"]),
        host_id="host0",
        kv_token_bytes=1000,
        num_free_tokens=96,
        max_sequences=64,
        tightest_tpot_s=None,
        utilization=0.0,
        pace=found.pace,
        lacks_adapter=False,
    )
    assert isinstance(found.utilization, float) and isinstance(found.pace, Pace)


def test_what_a_worker_reports_and_was_promised_is_what_routing_sees():
    registry, adapter = fleet(1), bytes([1]) * 32
    (link,), seen = registry.decode, registry.fleets[0].candidates.as_candidates
    ask = RoutingRequest(500, 501, adapter=adapter)
    (new,) = seen([link], Matches(), ask)
    assert (new.num_free_tokens, new.tightest_tpot_s, new.lacks_adapter) == (None, None, False)
    link.load = pb.Load(num_blocks_total=100, num_blocks_free=3, ready_adapters=[bytes(32)])
    for tpot_s in (0.2, 0.05, None):
        link.open(("request", len(link.legs)), Mailbox()).set_slo(tpot_s)
    (busy,) = seen([link], Matches(), ask)
    assert (busy.num_free_tokens, busy.tightest_tpot_s, busy.lacks_adapter) == (3 * 16, 0.05, True)


def test_adapters_that_are_ready():
    """A worker that names none has each ready that it holds."""
    a, b = bytes(32), bytes([1]) * 32
    ask = RoutingRequest(500, 501, adapter=a)
    assert candidates._lacks_adapter(pb.Load(ready_adapters=[b]), ask)
    assert not candidates._lacks_adapter(pb.Load(ready_adapters=[b, a]), ask)
    assert not candidates._lacks_adapter(pb.Load(), ask)
    assert not candidates._lacks_adapter(pb.Load(ready_adapters=[b]), RoutingRequest(500, 501))


def test_prompts_of_others_wait_behind_ones_own():
    """Tenants take turns: of what another has waiting as much is ahead as one's own tenant has, and this prompt."""
    link = type("Link", (), {"load": pb.Load(num_waiting_tokens=90_000)})()
    link.prefill_tokens = Counter(flood=80_000, quiet=100)
    link.num_prefill_tokens = link.prefill_tokens.total()
    assert candidates._waiting(link, RoutingRequest(500, 501, tenant="quiet")) == 100 + 600 + 600
    assert candidates._waiting(link, RoutingRequest(500, 501, tenant="flood")) == 80_000 + 100 + 9_900
    assert candidates._waiting(link, None) == 90_000
    link.prefill_tokens = Counter(default=80_100)
    assert candidates._waiting(link, RoutingRequest(500, 501)) == 90_000, "there is one tenant"


@pytest.mark.parametrize("stand_in", [False, True])
def test_adapters_while_no_decode_worker_serves(stand_in):
    registry = fleet(1, stand_in=stand_in)
    (prefill,), (decode,), model = registry.prefill, registry.decode, registry.fleets[0]
    serve(decode, "host0", role="decode", adapters={"tabs": 1, "prose": 2})
    serve(decode, "host0", role="decode", adapters={"tabs": 1})
    assert model.model.adapters == {"tabs": bytes([1] * 32)}, "one was unloaded"
    decode.lose("killed")
    serve(prefill, "host0", adapters={"verse": 3})
    assert model.model.adapters.keys() == ({"tabs", "verse"} if stand_in else {"tabs"})
    serve(decode, "host0", role="decode")
    assert not model.model.adapters
