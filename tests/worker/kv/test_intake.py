"""Fetches of a worker: what is not pulled, what ends the process, and what is said once of each source."""

import asyncio
import logging
from types import SimpleNamespace

import pytest
from google.rpc import code_pb2

from baton.engine.core.request import Refusal
from baton.worker.kv import intake
from baton.worker.kv.intake import Intake
from kvtransfer.compatible import EXACT, MIXED
from kvtransfer.errors import DeviceHangs, PeerLost, TransferFailed
from kvtransfer.transfer.fetcher import FetchReport
from tests.support.pace import patience
from tests.support.worker.fakes import FakeEngine


class FailingFetcher:
    def __init__(self, error: Exception):
        self._error = error

    async def fetch(self, handle, ticket, destination, deadline):
        raise self._error


def make_leg(num_tokens: int) -> SimpleNamespace:
    request = SimpleNamespace(token_ids=range(num_tokens), span_hashes=(), deadline=0.0)
    return SimpleNamespace(key="a", request=request, sources=[(b"", b"")], num_cached_tokens=0, num_pulled_tokens=0)


@pytest.fixture
def engine() -> FakeEngine:
    engine = FakeEngine()
    engine.answer["skip"] = 0
    return engine


def offer(monkeypatch, num_tokens: int) -> None:
    prompt = SimpleNamespace(num_tokens=num_tokens, span_hashes=())
    handle = SimpleNamespace(prompt=prompt, source_instance=b"")
    monkeypatch.setattr(intake, "decode_handle", lambda data: handle)


@pytest.mark.parametrize(("error", "leaves"), [(DeviceHangs("no end"), True), (TransferFailed("no room"), False)])
async def test_blocks_that_a_copy_may_still_write_are_given_to_nobody(engine, error, leaves, monkeypatch):
    """The process ends before the engine hears that nothing can land any more."""
    left = []
    monkeypatch.setattr(intake, "exit_for_lost_device", lambda why: left.append((why, engine.count("fetch_settled"))))
    offer(monkeypatch, 64)
    leg, ends = make_leg(128), []
    Intake(engine, FailingFetcher(error)).begin(leg, b"", b"", lambda *end: ends.append(end))
    with pytest.raises(type(error)):
        await leg.fetching
    assert left == ([("no end", 0)] if leaves else [])
    assert len(ends) == engine.count("fetch_settled") == 1


@pytest.mark.parametrize("error", [ValueError("label empty or too long"), RuntimeError("a fault of ours")])
async def test_a_fetch_that_fails_is_never_the_clients_mistake(engine, error, monkeypatch):
    """As BAD_COMMAND it was final: no other worker was tried."""
    offer(monkeypatch, 64)
    leg, ends = make_leg(128), []
    Intake(engine, FailingFetcher(error)).begin(leg, b"", b"", lambda leg, outcome: ends.append(outcome))
    with pytest.raises(type(error)):
        await leg.fetching
    assert [(each.code, each.reason) for each in ends] == [(code_pb2.INTERNAL, "INTERNAL")]


async def test_a_fetch_without_room_is_refused_as_all_else_is(engine, monkeypatch, caplog):
    """The pool fills up while it runs: it is asked for again, and is no fault."""
    offer(monkeypatch, 64)
    leg, ends = make_leg(128), []
    fetcher = FailingFetcher(Refusal("kv_full", 0.5))
    Intake(engine, fetcher).begin(leg, b"", b"", lambda leg, outcome: ends.append(outcome))
    with pytest.raises(Refusal):
        await leg.fetching
    assert ends == [(code_pb2.RESOURCE_EXHAUSTED, "KV_FULL", "refused: kv_full", 0.5)] and not caplog.records


@pytest.mark.parametrize(("num_tokens", "is_pulled"), [(128, True), (192, False), (100, False)])
async def test_of_a_prefix_something_is_left_to_compute(engine, num_tokens, is_pulled, monkeypatch):
    """The whole prompt would have no last token to draw the first one from."""
    offer(monkeypatch, num_tokens)
    leg = make_leg(192)
    began = Intake(engine, FailingFetcher(TransferFailed("no room"))).begin_prefix(leg, lambda *end: None, print)
    assert (began, engine.count("begin_fetch"), leg.sources) == (is_pulled, int(is_pulled), [])


class HaltingFetcher:
    """Brings ranges, and then nothing any more."""

    def __init__(self, monkeypatch, *upto_tokens: int):
        self._monkeypatch, self._upto_tokens = monkeypatch, upto_tokens

    async def fetch(self, handle, ticket, destination, deadline):
        for upto_token in self._upto_tokens:
            self._monkeypatch.setattr(intake, "SILENCE_S", 0.1)  # from now on: a range gives it that time
            destination.verified(upto_token)
        try:
            await asyncio.Event().wait()
        finally:
            destination.verified(max(self._upto_tokens, default=0))  # what was on its way when it was given up


@pytest.mark.parametrize("ranges", [(), (64, 128)])
async def test_a_prefix_that_does_not_come_is_not_waited_for(engine, ranges, monkeypatch):
    """It was, for as long as the request had time, 10 s of a source that cannot be reached: to save less than a
    second."""
    monkeypatch.setattr(intake, "SILENCE_S", 3600.0 if ranges else 0.1)
    monkeypatch.setattr(engine, "verify", lambda key, upto_token: upto_token, raising=False)
    offer(monkeypatch, 128)
    leg, ends = make_leg(192), []
    fetcher = HaltingFetcher(monkeypatch, *ranges)
    assert Intake(engine, fetcher).begin_prefix(leg, lambda leg, outcome: ends.append(outcome), lambda upto_token: None)
    with pytest.raises(PeerLost):
        async with asyncio.timeout(patience(20)):
            await leg.fetching
    assert [(each.reason, each.message) for each in ends] == [("KV_TRANSFER_FAILED", "nothing came for 0.1 s")]
    assert leg.num_pulled_tokens == leg.num_cached_tokens == max(ranges, default=0)


@pytest.mark.parametrize("sign", ["announced", "landed", "verified"])
async def test_each_sign_of_a_prefix_begins_the_wait_anew(engine, sign, monkeypatch):
    """Of a model with a state nothing is verified before all is there: what took longer was thrown away as it came."""
    monkeypatch.setattr(engine, "verify", lambda key, upto_token: upto_token, raising=False)
    monkeypatch.setattr(engine, "set_aside", lambda *args: [None], raising=False)
    monkeypatch.setattr(engine, "layout", SimpleNamespace(num_blocks=lambda token: 1), raising=False)
    offer(monkeypatch, 128)
    leg, whens = make_leg(192), []

    class FlowingFetcher:
        async def fetch(self, handle, ticket, destination, deadline):
            for _ in range(3):
                match sign:
                    case "announced":
                        destination.set_aside(64)
                    case "landed":
                        await destination.caught_up()
                    case "verified":
                        destination.verified(64)
                whens.append(silence.when())
                await asyncio.sleep(0.001)

    silence = asyncio.timeout(3600.0)
    monkeypatch.setattr(intake.asyncio, "timeout", lambda within_s: silence)
    assert Intake(engine, FlowingFetcher()).begin_prefix(leg, lambda *end: None, lambda upto_token: None)
    await leg.fetching
    assert whens == sorted(set(whens))


def report(transport: str, numerics: str = EXACT) -> FetchReport:
    return FetchReport(1, 1, 1, transport, numerics, 0.1, 0.1, f"{transport}: the first of both")


def test_each_transport_of_a_source_and_mixed_numerics_are_said_once(caplog):
    caplog.set_level(logging.INFO)
    intake = Intake(None, None)
    for _ in range(3):
        for source in (b"a" * 16, b"b" * 16):
            intake._log_new(source, report("shm"))
            intake._log_new(source, report("tcp", MIXED))
    assert len(caplog.records) == 6


def test_sources_that_are_gone_are_forgotten():
    """A worker outlives many whose KV it pulled."""
    intake = Intake(None, None)
    for source in range(1000):
        intake._log_new(source.to_bytes(16, "big"), report("shm"))
    assert len(intake._logged) == 256
