"""Workers that drain: nothing new, leases are taken or expire, what outlasts the grace moves."""

import asyncio
import time
from contextlib import asynccontextmanager
from types import SimpleNamespace

import grpc
import pytest

from baton.engine.core.config import EngineConfig
from baton.v1 import worker_pb2 as pb
from baton.worker import app
from baton.worker.legs.states import LegState
from baton.worker.session.drain import Drain
from baton.worker.settings import WorkerSettings
from tests.support.models import make_model
from tests.support.pace import patience
from tests.support.worker.fakes import LegMachineHarness
from tests.support.worker.key_paths import bring_to
from tests.support.worker.scripted import LegEnded, Pair, Session, make_spec, run_bounded, run_pair
from tests.worker.session.slow_answers import PROMPT, begin, decode_worker, spec_of, whole


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return make_model(tmp_path_factory.mktemp("model") / "tiny")


def test_what_outlasts_the_grace_moves(model):
    async def main():
        async with decode_worker(model) as (worker, target):
            spec = spec_of("seeded")
            expected = await whole(target, spec)
            slow_down(worker, 0.02)
            session = await Session(target).open()
            answer = await begin(session, "long", spec, 2)
            asked = await session.stub.Drain(pb.DrainRequest(grace_s=0.1))
            assert (asked.num_sequences, asked.role) == (1, "decode")
            draining = asyncio.create_task(worker.drain_when(asyncio.Event()))
            await ends_in_mid_answer(session, answer, draining)
            have = answer.token_ids[0]
            assert have == expected.token_ids[0][: len(have)] and len(have) > 2
            await session.close()

    run_bounded(main)


async def ends_in_mid_answer(session: Session, answer, draining) -> None:
    with pytest.raises(LegEnded) as ended:
        await Pair(session, session).gather(session, "long", answer)
    assert (ended.value.event.code, ended.value.event.reason) == (14, "DRAINING")
    assert await draining == ""


def slow_down(worker, seconds: float) -> None:
    step = worker.engine.step

    def slow_step():
        time.sleep(seconds)
        return step()

    worker.engine.step = slow_step


def test_what_ends_within_the_grace_ends_well(model):
    async def main():
        async with decode_worker(model, 0.005) as (worker, target):
            session = await Session(target).open()
            answer = await begin(session, "short", spec_of("greedy"), 1)
            await session.stub.Drain(pb.DrainRequest(next_role="prefill", grace_s=20))
            draining = asyncio.create_task(worker.drain_when(asyncio.Event()))
            await session.send(admit=pb.Admit(key=pb.Key(request_id="late"), spec=spec_of("greedy")))
            with pytest.raises(LegEnded) as refused:
                await session.next("late", "granted")
            assert refused.value.event.reason == "draining"
            again = await session.stub.Drain(pb.DrainRequest(next_role="prefill"))  # how far is it?
            assert again.num_sequences <= 1
            for other in ("decode", ""):
                with pytest.raises(grpc.aio.AioRpcError) as caught:
                    await session.stub.Drain(pb.DrainRequest(next_role=other))
                assert caught.value.code() is grpc.StatusCode.FAILED_PRECONDITION
                assert caught.value.details() == "it drains already, to be a prefill worker"
            await Pair(session, session).gather(session, "short", answer)
            assert await draining == "prefill", "the first drain has set the next role"
            await session.close()

    run_bounded(main)


def test_staying_away_may_be_asked_later_and_excludes_a_next_role(model, monkeypatch):
    monkeypatch.setenv("BATON_KEEPER", "baton up")

    async def main():
        async with decode_worker(model) as (worker, target):
            session = await Session(target).open()
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await session.stub.Drain(pb.DrainRequest(next_role="prefill", stay_away=True))
            assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
            assert caught.value.details().startswith("stay_away")
            assert (await session.stub.Drain(pb.DrainRequest())).keeper == "baton up"
            assert not worker.stays_away
            await session.stub.Drain(pb.DrainRequest(stay_away=True))
            assert worker.stays_away
            await session.close()

    run_bounded(main)


def test_an_idle_worker_says_that_it_drains_before_it_hangs_up(model):
    """Else gateways take it for one that has died."""

    async def main():
        async with decode_worker(model) as (worker, target):
            session = await Session(target).open()
            await session.next_load()
            await session.stub.Drain(pb.DrainRequest())
            await worker.drain_when(asyncio.Event())
            async with asyncio.timeout(patience(10)):
                await session.call.code()  # the session has ended
            assert session.loads[-1].state == "draining"
            await session.close()

    run_bounded(main)


@pytest.mark.parametrize("stop_first", [False, True])
def test_what_keeps_it_running_is_told_what_follows(model, monkeypatch, capfd, stop_first):
    monkeypatch.setenv("BATON_KEEPER", "baton up")

    async def main():
        async with decode_worker(model) as (worker, target):
            stop, session = asyncio.Event(), await Session(target).open()
            if stop_first:
                stop.set()
            else:
                await session.stub.Drain(pb.DrainRequest(next_role="prefill"))
            draining = asyncio.create_task(worker.drain_when(stop))
            await session.close()
            await draining

    run_bounded(main)
    assert capfd.readouterr().out == f"draining next={'restart' if stop_first else 'prefill'}\n"


def test_it_is_told_of_a_worker_that_is_to_stay_away_after_all(model, monkeypatch, capfd):
    monkeypatch.setenv("BATON_KEEPER", "baton up")

    async def main():
        async with decode_worker(model) as (_, target):
            session = await Session(target).open()
            await session.stub.Drain(pb.DrainRequest())
            await session.stub.Drain(pb.DrainRequest(stay_away=True))
            await session.close()

    run_bounded(main)
    assert capfd.readouterr().out == "draining next=restart\ndraining next=away\n"


def test_a_grace_that_was_too_long_can_be_shortened_and_never_lengthened(model):
    async def main():
        async with decode_worker(model) as (worker, target):
            slow_down(worker, 0.02)
            session = await Session(target).open()
            answer = await begin(session, "long", spec_of("seeded"), 2)
            await session.stub.Drain(pb.DrainRequest(grace_s=3000))
            draining = asyncio.create_task(worker.drain_when(asyncio.Event()))
            for grace_s in (2000, 0, 0.2, 1000):
                assert (await session.stub.Drain(pb.DrainRequest(grace_s=grace_s))).num_sequences == 1
            await ends_in_mid_answer(session, answer, draining)
            await session.close()

    run_bounded(main)


def test_a_signal_ends_a_drain_by_the_workers_own_grace_and_without_a_next_role(model):
    async def main():
        async with decode_worker(model, drain_grace_s=0.5) as (worker, target):
            slow_down(worker, 0.2)
            session, stop = await Session(target).open(), asyncio.Event()
            answer = await begin(session, "long", spec_of("seeded"), 2)
            await session.stub.Drain(pb.DrainRequest(next_role="prefill", grace_s=3000))
            draining = asyncio.create_task(worker.drain_when(stop))
            await asyncio.sleep(0.1)
            stop.set()
            await ends_in_mid_answer(session, answer, draining)
            await session.close()

    run_bounded(main)


@pytest.mark.parametrize("is_told", [True, False])
def test_a_signal_while_a_drained_worker_closes_brings_no_next_role(model, monkeypatch, is_told):
    """It was forgotten when the process became the other role's program, which was killed after its grace."""

    async def main():
        stop = asyncio.Event()
        async with decode_worker(model) as (worker, target):

            @asynccontextmanager
            async def running(*_):
                yield worker
                if is_told:
                    stop.set()

            monkeypatch.setattr(app, "running", running)
            monkeypatch.setattr(app.telemetry, "setup", lambda name: None)
            session = await Session(target).open()
            await session.stub.Drain(pb.DrainRequest(next_role="prefill"))
            ended = await app.serve(WorkerSettings(EngineConfig(model)), "decode", {}, stop)
            assert ended == 0 if is_told else ended.role == "prefill"
            await session.close()

    run_bounded(main)


def test_a_drain_behind_a_signal_lengthens_nothing_and_brings_no_role(model):
    async def main():
        async with decode_worker(model, drain_grace_s=1.0) as (worker, target):
            slow_down(worker, 0.2)
            session = await Session(target).open()
            answer = await begin(session, "long", spec_of("seeded"), 2)
            draining = asyncio.create_task(worker.drain_when(told_to_go()))
            await asyncio.sleep(0)
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await session.stub.Drain(pb.DrainRequest(next_role="prefill", grace_s=3000))
            assert caught.value.details() == "it drains already, to end"
            assert (await session.stub.Drain(pb.DrainRequest(grace_s=3000))).num_sequences == 1
            await ends_in_mid_answer(session, answer, draining)
            await session.close()

    run_bounded(main)


@pytest.mark.parametrize("request_, field", [
    (pb.DrainRequest(next_role="gateway"), "next_role"),
    (pb.DrainRequest(grace_s=-1), "grace_s"),
    (pb.DrainRequest(next_role="\x1b[2J" * 1000), "next_role"),
    (pb.DrainRequest(grace_s=float("nan")), "grace_s"),
    (pb.DrainRequest(grace_s=float("inf")), "grace_s"),
    (pb.DrainRequest(grace_s=1e300), "grace_s"),
])  # fmt: skip
def test_what_cannot_be_asked(model, request_, field):
    async def main():
        async with decode_worker(model) as (_worker, target):
            session = await Session(target).open()
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await session.stub.Drain(request_)
            assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT and field in caught.value.details()
            await session.close()

    run_bounded(main)


async def test_a_sequence_that_nobody_reads_is_not_waited_for():
    harness, ended = LegMachineHarness(), []
    bring_to(harness, LegState.ORPHANED)
    drain = Drain(harness.dispatcher, SimpleNamespace(outboxes=(), hang_up=lambda: ended.append(True)), grace_s=3000)
    assert drain.ask("", 0) == 0 and harness.dispatcher.legs
    async with asyncio.timeout(patience(2)):
        await drain.run()
    assert ended


@pytest.mark.parametrize("is_pulled", [True, False])
def test_a_prefill_worker_waits_for_its_leases(model, is_pulled):
    async def main():
        async with run_pair(model, lease_ttl_s=2.0) as (pair, prefill, _decode):
            spec, key = make_spec(PROMPT, max_tokens=4), pb.Key(request_id="held")
            await pair.decode.send(admit=pb.Admit(key=key, spec=spec))
            await pair.decode.next("held", "granted")
            taker = pair.taker()
            await pair.prefill.send(prefill=pb.Prefill(key=key, spec=spec, taker=taker))
            accepted = await pair.prefill.next("held", "accepted")
            first = (await pair.prefill.next("held", "done")).first_tokens
            draining = asyncio.create_task(prefill.drain_when(told_to_go()))
            await asyncio.sleep(0.1)
            assert not draining.done(), "its lease is out"
            if is_pulled:
                await pair.decode.send(fetch=pb.Fetch(key=key, handle=accepted.handle, ticket=accepted.ticket))
                await pair.decode.send(start=pb.Start(key=key, first_tokens=first))
                await pair.decode.next("held", "fetched")
            else:
                await pair.decode.send(cancel=pb.Cancel(key=key))
            ended = await pair.prefill.wait_ended("held")
            assert ended.reason == ("" if is_pulled else "LEASE_EXPIRED")
            await draining

    run_bounded(main)


def told_to_go() -> asyncio.Event:
    stop = asyncio.Event()
    stop.set()
    return stop
