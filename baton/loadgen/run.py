"""One run: jobs over one or several sender processes, and back as outcomes in order."""

import asyncio
import contextlib
import multiprocessing
import signal
import threading
import time
from collections.abc import Callable, Coroutine, Iterator, Sequence
from dataclasses import dataclass
from multiprocessing.queues import SimpleQueue
from multiprocessing.synchronize import Event
from typing import NamedTuple

from baton.loadgen.client import Sender
from baton.loadgen.outcome import Latencies, Outcome
from baton.loadgen.plan import RunPlan
from baton.loadgen.workload import Job, shares

_HEAD_START_S = 0.2  # between the last process being ready and the first request
_POLL_S = 0.1  # of what processes share
_STOPPED_S = 10.0  # until a sender process that was told to stop has


@dataclass(frozen=True)
class Ran:
    outcomes: list[Outcome]
    duration_s: float
    cpu_share: float  # of the busiest sender process, of one core: near 1 it is the sender that is measured
    is_interrupted: bool = False  # by Ctrl-C: the outcomes are of the requests that had ended


class _Sent(NamedTuple):
    """Outcomes, CPU share and interruption of one sender process."""

    outcomes: list[Outcome]
    cpu_share: float
    is_interrupted: bool


OnEnd = Callable[[Latencies], object]


def run_jobs(plan: RunPlan, jobs: Sequence[Job], on_end: OnEnd = lambda latencies: None) -> Ran:
    """Send all jobs and wait for all ends, or for Ctrl-C. `on_end`: called at each end (from a thread of its own)."""
    if plan.num_processes == 1:
        sent = [_send(plan, list(jobs), plan.concurrency, lambda: time.monotonic() + _HEAD_START_S, on_end)]
    else:
        sent = _in_processes(plan, jobs, on_end)
    outcomes = sorted((outcome for each in sent for outcome in each.outcomes), key=lambda outcome: outcome.index)
    duration_s = max((outcome.last_s for outcome in outcomes), default=0.0)
    return Ran(outcomes, duration_s, max(each.cpu_share for each in sent), any(each.is_interrupted for each in sent))


def _send(
    plan, jobs, concurrency, begin_when_ready: Callable[[], float], on_end: OnEnd, stop: Event | None = None
) -> _Sent:
    async def send() -> _Sent:
        sender, ended, is_interrupted = Sender(plan, on_end), [], False
        try:
            sender.prepare(jobs)
            begin, cpu = begin_when_ready(), time.process_time()
            if concurrency is None:
                sending = sender.open(jobs, begin, ended)
            else:
                sending = sender.closed(jobs, concurrency, begin, ended)
            try:
                await (sending if stop is None else _unless_stopped(sending, stop))
            except asyncio.CancelledError:  # asyncio's answer to Ctrl-C
                is_interrupted = True
            share = (time.process_time() - cpu) / max(time.monotonic() - begin, 1e-9)
            return _Sent(ended, share, is_interrupted)
        finally:
            await sender.close()

    return asyncio.run(send())


async def _unless_stopped(sending: Coroutine, stop: Event) -> None:
    """Raises CancelledError once `stop` is set."""
    task = asyncio.create_task(sending)
    while not (await asyncio.wait((task,), timeout=_POLL_S))[0]:
        if stop.is_set():
            task.cancel()
    await task


def _in_processes(plan: RunPlan, jobs, on_end: OnEnd) -> list[_Sent]:
    context = multiprocessing.get_context("spawn")  # grpc does not survive a fork
    parts = shares(jobs, min(plan.num_processes, plan.concurrency or plan.num_processes))
    ended, begin, stop = context.SimpleQueue(), context.Value("d", 0.0), context.Event()
    ready = context.Barrier(len(parts) + 1)
    with contextlib.ExitStack() as exits:
        pool = exits.enter_context(context.Pool(len(parts), _prepare, (ended, begin, ready, stop)))
        exits.enter_context(_told(ended, on_end))
        concurrencies = _split(plan.concurrency, len(parts))
        results = pool.starmap_async(_process, [(plan, *each) for each in zip(parts, concurrencies, strict=True)], 1)
        while ready.n_waiting < len(parts):
            if results.ready():
                results.get()  # raises what kept a process from coming
            time.sleep(0.01)
        begin.value = time.monotonic() + _HEAD_START_S
        ready.wait()
        try:
            return results.get()
        except KeyboardInterrupt:
            stop.set()
            return results.get(_STOPPED_S)


def _split(concurrency: int | None, num: int) -> list[int | None]:
    if concurrency is None:
        return [None] * num
    return [(concurrency + index) // num for index in range(num)]


_shared: tuple = ()


def _prepare(*shared) -> None:
    global _shared
    _shared = shared
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches all of a terminal: the parent says when to stop


def _process(plan: RunPlan, jobs: list[Job], concurrency: int | None) -> _Sent:
    ended, begin, ready, stop = _shared

    def begin_when_ready() -> float:
        ready.wait()
        return begin.value

    return _send(plan, jobs, concurrency, begin_when_ready, ended.put, stop)


@contextlib.contextmanager
def _told(ended: "SimpleQueue[Latencies | None]", on_end: OnEnd) -> Iterator[None]:
    """Tells the ends in other processes, as they come."""

    def tell() -> None:
        while (latencies := ended.get()) is not None:
            on_end(latencies)

    thread = threading.Thread(target=tell)
    thread.start()
    try:
        yield
    finally:
        ended.put(None)
        thread.join()
