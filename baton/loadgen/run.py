"""One run: jobs over one or several sender processes, and back as outcomes in order."""

import asyncio
import contextlib
import multiprocessing
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from baton.loadgen.client import Sender
from baton.loadgen.outcome import Outcome
from baton.loadgen.plan import RunPlan
from baton.loadgen.workload import Job, shares

_HEAD_START_S = 0.2  # between the last process being ready and the first request


@dataclass(frozen=True)
class Ran:
    outcomes: list[Outcome]
    duration_s: float
    cpu_share: float  # of the busiest sender process, of one core: near 1 it is the sender that is measured


def run_jobs(plan: RunPlan, jobs: Sequence[Job], on_end: Callable[[int], object] = lambda num: None) -> Ran:
    """Sends all jobs and waits for all ends. `on_end(num)`: as many more have ended (from a thread of its own)."""
    if plan.num_processes == 1:
        outcomes, cpu_share = _send(
            plan, list(jobs), plan.concurrency, lambda: time.monotonic() + _HEAD_START_S, lambda: on_end(1)
        )
        cpu_shares = [cpu_share]
    else:
        outcomes, cpu_shares = _in_processes(plan, jobs, on_end)
    outcomes.sort(key=lambda outcome: outcome.index)
    duration_s = max((outcome.last_s for outcome in outcomes), default=0.0)
    return Ran(outcomes, duration_s, max(cpu_shares))


def _send(plan, jobs, concurrency, begin_when_ready: Callable[[], float], on_end) -> tuple[list[Outcome], float]:
    async def send() -> tuple[list[Outcome], float]:
        sender = Sender(plan, on_end)
        try:
            sender.prepare(jobs)
            begin, cpu = begin_when_ready(), time.process_time()
            sending = sender.open(jobs, begin) if concurrency is None else sender.closed(jobs, concurrency, begin)
            outcomes = await sending
            return outcomes, (time.process_time() - cpu) / max(time.monotonic() - begin, 1e-9)
        finally:
            await sender.close()

    return asyncio.run(send())


def _in_processes(plan: RunPlan, jobs, on_end) -> tuple[list[Outcome], list[float]]:
    context = multiprocessing.get_context("spawn")  # grpc does not survive a fork
    parts = shares(jobs, plan.num_processes)
    ended, begin = context.Value("q", 0), context.Value("d", 0.0)
    ready = context.Barrier(len(parts) + 1)
    with contextlib.ExitStack() as exits:
        pool = exits.enter_context(context.Pool(len(parts), _prepare, (ended, begin, ready)))
        exits.enter_context(_polled(ended, on_end))
        concurrencies = _split(plan.concurrency, len(parts))
        results = pool.starmap_async(_process, [(plan, *each) for each in zip(parts, concurrencies, strict=True)], 1)
        while ready.n_waiting < len(parts):
            if results.ready():
                results.get()  # raises what kept a process from coming
            time.sleep(0.01)
        begin.value = time.monotonic() + _HEAD_START_S
        ready.wait()
        done = results.get()
    return [outcome for outcomes, _ in done for outcome in outcomes], [share for _, share in done]


def _split(concurrency: int | None, num: int) -> list[int | None]:
    if concurrency is None:
        return [None] * num
    return [max(1, (concurrency + index) // num) for index in range(num)]


_shared: tuple = ()


def _prepare(*shared) -> None:
    global _shared
    _shared = shared


def _process(plan: RunPlan, jobs: list[Job], concurrency: int | None) -> tuple[list[Outcome], float]:
    ended, begin, ready = _shared

    def begin_when_ready() -> float:
        ready.wait()
        return begin.value

    def on_end() -> None:
        with ended.get_lock():
            ended.value += 1

    return _send(plan, jobs, concurrency, begin_when_ready, on_end)


@contextlib.contextmanager
def _polled(ended, on_end: Callable[[int], None]) -> Iterator[None]:
    """Tells the progress of other processes, ten times a second."""
    stopping, told = threading.Event(), 0

    def poll() -> None:
        nonlocal told
        while True:
            stopped = stopping.wait(0.1)
            now = ended.value
            if now > told:
                on_end(now - told)
                told = now
            if stopped:
                return

    thread = threading.Thread(target=poll)
    thread.start()
    try:
        yield
    finally:
        stopping.set()
        thread.join()
