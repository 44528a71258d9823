"""G: a worker of two ranks, of two stages, or of two stages of two ranks, that loses the last of them, in every phase:
it ends with all its ranks, and others go on with every token."""

import asyncio
import signal
import sys
import time

import psutil
import pytest

from baton.engine import native
from tests.support.faults.cases import NOBODY_NOTICES, record_gaps
from tests.support.pace import patience
from tests.support.process import Process, children

pytestmark = [
    pytest.mark.long,
    pytest.mark.skipif(native.library() is None, reason=native.unavailable() or "there"),
]
OPTIONS = ("--num-blocks", "96", "--threads", "1", "--max-num-batched-tokens", "128", "--strict-numerics")
RANKS = ("--tensor-parallel", "2")
STAGES = ("--pipeline-parallel", "2")
GRID = (*RANKS, *STAGES)
ENDS = "so this worker ends with all its ranks"
HOW = [signal.SIGKILL, signal.SIGSTOP]


@pytest.fixture(scope="module", params=[RANKS, STAGES, GRID], ids=["ranks", "stages", "grid"])
def groups(request, make_world):
    """Both prefill workers are groups, one decode worker is one and one is one process: of one numerics class."""
    unlike = {"prefill_options": request.param, "decode_options": request.param, "unlike_decode": [()]}
    with make_world("groups", options=OPTIONS, num_decode=1, **unlike) as world:
        yield world


async def lose(c, worker: Process, how: signal.Signals) -> None:
    """Signal the last rank of a worker, which ends with all ranks and the reason."""
    ranks = children(worker.pid)
    rank = ranks[-1]
    psutil.Process(rank).send_signal(how)
    begun = time.monotonic()
    assert await c.world.aside(worker.wait) == 1
    assert f"rank {len(ranks)} (pid {rank})" in worker.text() and ENDS in worker.text()
    c.figures["ended_after_s"] = round(time.monotonic() - begun, 2)
    worker.killed = True
    assert all(is_gone(pid) for pid in ranks)


def is_gone(pid: int) -> bool:
    """Return whether a process has ended, or does so within moments of its worker."""
    deadline = time.monotonic() + patience(2)
    while psutil.pid_exists(pid) and psutil.Process(pid).status() != psutil.STATUS_ZOMBIE:
        if time.monotonic() > deadline:
            return False
        time.sleep(0.01)
    return True


async def running(asks, num_tokens: int) -> None:
    await asyncio.gather(*(ask.got(num_tokens) for ask in asks))


@pytest.mark.parametrize("how", HOW)
async def test_a_rank_is_lost_while_it_decodes(case, groups, how):
    """Of stages each has a step: half of so many requests are 16 and more, which take turns."""
    async with case(f"G1 decode {how.name}", NOBODY_NOTICES, world=groups) as c:
        with c.slow():
            asks = c.ask_many(36, 20, max_tokens=40)
            await running(asks, 5)
            await lose(c, c.stack.decode[0], how)
        await c.ended()
        record_gaps(c, asks)


@pytest.mark.parametrize("how", HOW)
async def test_a_rank_is_lost_while_it_prefills(case, groups, how):
    async with case(f"G2 prefill {how.name}", NOBODY_NOTICES, world=groups) as c:
        with c.slow("engine.step=sleep:0.2"):
            asks = c.ask_many(4, 500, max_tokens=8)
            await lose(c, await c.busy("prefill"), how)
        await c.ended()
        record_gaps(c, asks)


async def test_a_rank_is_lost_while_kv_is_taken_from_it(case, groups):
    async with case("G3 handoff", NOBODY_NOTICES, world=groups) as c:
        for process in c.stack.decode:
            process.arm("transfer.landed=sleep:0.5")
        asks = c.ask_many(3, 500, max_tokens=8)
        await lose(c, await c.busy("prefill"), signal.SIGKILL)
        await c.ended()
        record_gaps(c, asks)


async def test_a_rank_is_lost_while_its_worker_drains(case, groups):
    async with case("G4 drain", NOBODY_NOTICES, world=groups) as c:
        with c.slow("engine.step=sleep:0.05"):
            asks = c.ask_many(4, max_tokens=60)
            await running(asks, 3)
            going = c.stack.decode[0]
            going.terminate()
            await asyncio.sleep(0.3)
            await lose(c, going, signal.SIGKILL)
        await c.ended()
        record_gaps(c, asks)


async def test_a_rank_has_no_memory_left_for_a_prompt(case, groups):
    """Served with the memory that the rank has, or the worker ends and others read it."""
    async with case("G5 out of memory", NOBODY_NOTICES, world=groups) as c:
        for worker in c.stack.prefill[:1]:
            seen = psutil.Process(children(worker.pid)[-1])
            seen.rlimit(psutil.RLIMIT_AS, (1, psutil.RLIM_INFINITY))  # nothing more than it has
            asks = c.ask_many(4, 800, max_tokens=8)
            await c.ended()
            if not worker.alive:
                assert await c.world.aside(worker.wait) == 1 and ENDS in worker.text()
                worker.killed = True
            else:
                seen.rlimit(psutil.RLIMIT_AS, (psutil.RLIM_INFINITY, psutil.RLIM_INFINITY))
            c.figures["ended"] = worker.killed
        record_gaps(c, asks)


# ---- before it serves ----


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("rank.load=kill", "rank 1 ended at its start with status -9"),
        ("rank.load=fail", "rank 1 ended at its start with status 1"),
        ("rank.ready=kill", "rank 1 ended at its start with status -9"),
    ],
)
def test_a_rank_is_lost_while_it_loads(model, tmp_path, text, said):
    """One line, and no process is left."""
    argv = [sys.executable, "-m", "decode_worker", "--model", str(model), "--listen", "127.0.0.1:0", *OPTIONS, *RANKS]
    worker = Process("worker", argv, tmp_path, {"BATON_FAILPOINTS": text})
    assert worker.wait() == 2, worker.tail()
    assert said in worker.text()
