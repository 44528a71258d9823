"""The two programs as processes: start, 200 requests with cancels everywhere, drain, one whole trace."""

import asyncio
import random
import secrets
import signal
import sys
from contextlib import asynccontextmanager

import pytest

from baton.v1 import worker_pb2 as pb
from tests.support.models import make_model
from tests.support.observe.otlp import Receiver
from tests.support.process import Process
from tests.support.stack import SLOW_STEPS
from tests.support.worker.scripted import LegEnded, Pair, Session, make_spec, run_bounded

OPTIONS = ("--num-blocks", "200", "--threads", "1", "--max-num-seqs", "16")
PHASES = ("admitted", "accepted", "fetching", "done", "started", "row", "never")


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return make_model(tmp_path_factory.mktemp("model") / "tiny")


def start(fork_server, model, folder, *options: str, env=None) -> list[Process]:
    """Both roles; the caller stops them."""
    return [
        fork_server.process(
            role, [sys.executable, "-m", f"{role}_worker", "--model", str(model), *OPTIONS, *options], folder, env, True
        )
        for role in ("prefill", "decode")
    ]


@asynccontextmanager
async def open_pair(processes: list[Process]):
    targets = [(await asyncio.to_thread(process.ready))["grpc"] for process in processes]
    sessions = [await Session(target).open() for target in targets]
    try:
        yield Pair(*sessions)
    finally:
        for session in sessions:
            await session.close()


@pytest.fixture
def workers(fork_server, model, tmp_path):
    """Both must go by themselves, with status 0 and clean logs."""
    with Receiver() as receiver:
        env = {"OMP_NUM_THREADS": "1", "OTEL_EXPORTER_OTLP_ENDPOINT": receiver.endpoint}
        processes = start(fork_server, model, tmp_path, env=env)
        for process in processes:
            process.arm("engine.step=sleep:0.005")  # what happens in mid-stream must find the stream there
        try:
            yield processes, receiver
            for process in processes:
                assert process.stop() == 0, process.text()
                log = process.text()
                for word in ("Traceback", "never retrieved", "Task was destroyed", "LEDGER", "CRITICAL", "ERROR"):
                    assert word not in log, log
        finally:
            for process in processes:
                process.kill()


def draw(rng: random.Random) -> pb.RequestSpec:
    """A request, some with prompts that share a prefix, some with choices."""
    shared = [5 + i % 900 for i in range(rng.choice((0, 64, 128)))]
    token_ids = shared + [5 + rng.randrange(1000) for _ in range(rng.randrange(1, 300))]
    return make_spec(
        token_ids, max_tokens=rng.randrange(1, 24), n=rng.choice((1, 1, 1, 3)), temperature=rng.choice((0.0, 1.0)),
        seed=rng.randrange(1 << 30), budget_ms=rng.choice((60_000,) * 12 + (150,)),
    )  # fmt: skip


async def one_request(pair: Pair, rng: random.Random, endings: dict[str, int]) -> None:
    phase, spec, name = rng.choice(PHASES), draw(rng), secrets.token_hex(8)
    cancelling: list[asyncio.Task] = []

    def reached(now: str) -> None:
        if now == phase and not cancelling:
            cancelling.append(asyncio.create_task(pair.cancel(name)))

    try:
        await pair.generate(name, spec, reached)
        ending = "finished"
    except LegEnded as ended:
        ending = getattr(ended.event, "reason", "")
        if isinstance(ended.event, pb.Refused):
            await asyncio.sleep(ended.event.retry_after_ms / 1000)
        await pair.cancel(name)  # the other leg
    endings[ending] = endings.get(ending, 0) + 1
    await asyncio.gather(*cancelling)


def test_200_requests_with_cancels_in_every_phase_leak_nothing(workers):
    processes, _ = workers
    rng, endings = random.Random(20), {}

    async def lane(pair, count):
        for _ in range(count):
            await one_request(pair, rng, endings)

    async def main():
        async with open_pair(processes) as pair:
            await asyncio.gather(*(lane(pair, 25) for _ in range(8)))
            for session in (pair.prefill, pair.decode):
                blocks = await session.wait_idle()
                assert blocks["cached"] + blocks["free"] == 200
                assert set(session.num_ended.values()) == {1}, "a leg ended more than once"
            answer = await pair.generate("after", make_spec([9] * 150, max_tokens=5))
            assert len(answer.token_ids[0]) == 5

    run_bounded(main)
    assert sum(endings.values()) == 200 and endings["finished"] > 10 and endings["CANCELLED"] > 20, endings
    assert not endings.keys() & {"INTERNAL", "ENGINE_FAILED", "BAD_COMMAND", "DIGEST_MISMATCH"}, endings


def test_a_trace_of_every_ending(workers):
    processes, receiver = workers

    def context() -> tuple[str, str]:
        trace_id = secrets.token_hex(16)
        return trace_id, f"00-{trace_id}-{'ab' * 8}-01"

    async def main():
        async with open_pair(processes) as pair:
            whole, traceparent = context()
            await pair.generate("whole", make_spec([7] * 150, max_tokens=6, traceparent=traceparent))
            cut, traceparent = context()
            started = asyncio.Event()
            spec = make_spec([8] * 150, max_tokens=800, traceparent=traceparent)
            walk = asyncio.create_task(pair.generate("cut", spec, lambda phase: phase == "row" and started.set()))
            await started.wait()
            await pair.cancel("cut")
            with pytest.raises(LegEnded):
                await walk
            late, traceparent = context()
            with pytest.raises(LegEnded):
                spec = make_spec([3] * 150, max_tokens=800, traceparent=traceparent, budget_ms=1500)
                await pair.generate("late", spec)
            await pair.cancel("late")
            return whole, cut, late

    names = {"prefill", "prefill.queue", "prefill.compute", "kv.transfer", "decode", "decode.queue", "decode.steps"}
    statuses = {}
    for trace_id, ending in zip(run_bounded(main), ("ok", "cancelled", "error"), strict=True):
        receiver.wait_for(lambda spans, wanted=trace_id: sum(span.trace_id == wanted for span in spans) >= 7)
        spans = {span.name: span for span in receiver.trace(trace_id)}
        assert spans.keys() == names and len(receiver.trace(trace_id)) == 7
        statuses[ending] = spans["decode"].status
        assert spans["kv.transfer"].attributes["baton.num_tokens"] == 150
        assert spans["kv.transfer"].attributes["baton.transport"] == "shm"
        for name, span in spans.items():
            parent = spans[name.split(".")[0]].span_id if name.count(".") and name != "kv.transfer" else "ab" * 8
            assert span.parent_id == parent, name
    assert statuses == {ending: ending for ending in statuses}


def test_a_worker_drains_on_sigterm(fork_server, model, tmp_path):
    """SIGTERM in mid-stream: new requests are refused, the running one ends well, then the process goes."""
    processes = start(fork_server, model, tmp_path)
    processes[1].arm(SLOW_STEPS)

    async def main():
        async with open_pair(processes) as pair:
            started = asyncio.Event()
            spec = make_spec([6] * 100, max_tokens=300)
            walk = asyncio.create_task(pair.generate("runs", spec, lambda phase: phase == "row" and started.set()))
            await started.wait()
            for process in processes:
                process.terminate()
            while not pair.decode.loads or pair.decode.loads[-1].state != "draining":
                await asyncio.sleep(0.01)
            with pytest.raises(LegEnded) as caught:
                await pair.generate("new", make_spec([6] * 10))
            assert caught.value.event.reason == "draining" and caught.value.event.retry_after_ms
            processes[1].arm("")
            assert len((await walk).token_ids[0]) == 300

    try:
        run_bounded(main)
        assert [process.wait() for process in processes] == [0, 0]
    finally:
        for process in processes:
            process.kill()


def test_drain_ends_what_is_too_long(fork_server, model, tmp_path):
    processes = start(fork_server, model, tmp_path, "--drain-grace-s", "0.3")

    async def main():
        async with open_pair(processes) as pair:
            key = pb.Key(request_id="granted")
            await pair.decode.send(admit=pb.Admit(key=key, spec=make_spec([6] * 100)))
            await pair.decode.next("granted", "granted")
            processes[1].popen.send_signal(signal.SIGTERM)
            ended = await pair.decode.wait_ended("granted")
            assert (ended.code, ended.reason) == (14, "DRAINING")

    try:
        run_bounded(main)
        assert processes[1].wait() == 0
        assert processes[0].stop() == 0
    finally:
        for process in processes:
            process.kill()


def test_the_source_dies_in_mid_transfer(fork_server, model, tmp_path):
    """kill -9 between Accepted and Done: the taker's key ends with a reason, its blocks come back, it serves on."""
    processes = start(fork_server, model, tmp_path, "--max-num-batched-tokens", "128")

    async def main():
        async with open_pair(processes) as pair:
            key, spec = pb.Key(request_id="orphan"), make_spec([4, 9] * 450)
            await pair.decode.send(admit=pb.Admit(key=key, spec=spec))
            await pair.decode.next("orphan", "granted")
            await pair.prefill.send(prefill=pb.Prefill(key=key, spec=spec, taker=pair.taker()))
            accepted = await pair.prefill.next("orphan", "accepted")
            processes[0].popen.send_signal(signal.SIGSTOP)
            await pair.decode.send(fetch=pb.Fetch(key=key, handle=accepted.handle, ticket=accepted.ticket))
            processes[0].kill()
            ended = await pair.decode.wait_ended("orphan")
            assert (ended.code, ended.reason) == (14, "KV_TRANSFER_FAILED")
            blocks = await pair.decode.wait_idle()
            assert blocks["cached"] + blocks["free"] == 200
            local = await pair.generate_here("local", make_spec([4, 9] * 50, max_tokens=3))
            assert len(local.token_ids[0]) == 3

    try:
        run_bounded(main)
        assert processes[1].stop() == 0
    finally:
        for process in processes:
            process.kill()
