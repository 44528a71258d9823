"""One run: send jobs from one or several processes, and return their outcomes in order."""

import asyncio
import contextlib
import multiprocessing
import signal
import time
from collections.abc import Callable, Coroutine, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from typing import Any, NamedTuple

from baton.loadgen.client import Sender
from baton.loadgen.outcome import Latencies, Outcome
from baton.loadgen.plan import RunPlan
from baton.loadgen.workload import Job, shares

_HEAD_START_S = 0.2  # between the last process being ready and the first request
_POLL_S = 0.1  # between two checks whether a sender process was told to stop
_STOPPED_S = 10.0  # for a sender process to stop after it was told


class SenderDied(Exception):
    """A sender process ended before its requests; one line."""


@dataclass(frozen=True)
class Ran:
    outcomes: list[Outcome]
    duration_s: float
    cpu_share: float  # of the busiest sender process, as a share of one core: near 1 the sender is what is measured
    is_interrupted: bool = False  # by Ctrl-C; then the outcomes are those of the requests that had ended


class _Sent(NamedTuple):
    """Outcomes, CPU share and interruption of one sender process."""

    outcomes: list[Outcome]
    cpu_share: float
    is_interrupted: bool


OnEnd = Callable[[Latencies], object]


def run_jobs(plan: RunPlan, jobs: Sequence[Job], on_end: OnEnd = lambda latencies: None) -> Ran:
    """Send all jobs, and wait until all have ended, or for Ctrl-C. `on_end` is called as each ends, from another
    thread. Raises SenderDied."""
    if plan.num_processes == 1:
        sent = [_send(plan, list(jobs), plan.concurrency, lambda: time.monotonic() + _HEAD_START_S, on_end)]
    else:
        sent = _in_processes(plan, jobs, on_end)
    outcomes = sorted((outcome for each in sent for outcome in each.outcomes), key=lambda outcome: outcome.index)
    duration_s = max((outcome.last_s for outcome in outcomes), default=0.0)
    return Ran(outcomes, duration_s, max(each.cpu_share for each in sent), any(each.is_interrupted for each in sent))


def _send(
    plan,
    jobs,
    concurrency,
    begin_when_ready: Callable[[], float],
    on_end: OnEnd,
    is_stopped: Callable[[], bool] | None = None,
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
                await (sending if is_stopped is None else _unless_stopped(sending, is_stopped))
            except asyncio.CancelledError:  # asyncio raises it after Ctrl-C
                is_interrupted = True
            share = (time.process_time() - cpu) / max(time.monotonic() - begin, 1e-9)
            return _Sent(ended, share, is_interrupted)
        finally:
            await sender.close()

    return asyncio.run(send())


async def _unless_stopped(sending: Coroutine, is_stopped: Callable[[], bool]) -> None:
    """Await `sending`, and cancel it once `is_stopped()`. Raises CancelledError then."""
    task = asyncio.create_task(sending)
    while not (await asyncio.wait((task,), timeout=_POLL_S))[0]:
        if is_stopped():
            task.cancel()
    await task


def _in_processes(plan: RunPlan, jobs, on_end: OnEnd) -> list[_Sent]:
    parts = shares(jobs, min(plan.num_processes, plan.concurrency or plan.num_processes))
    with contextlib.ExitStack() as exits:
        reader = exits.enter_context(ThreadPoolExecutor(1))
        senders = [exits.enter_context(contextlib.closing(_SenderProcess())) for _ in parts]
        for sender, part, concurrency in zip(senders, parts, _split(plan.concurrency, len(parts)), strict=True):
            sender.send((plan, part, concurrency))
        for sender in senders:
            sender.receive()  # the sender is ready
        begin = time.monotonic() + _HEAD_START_S
        for sender in senders:
            sender.send(begin)
        # A thread reads, since Ctrl-C in the middle of a message would lose the message.
        sent = reader.submit(_read, senders, on_end)
        try:
            return sent.result()
        except KeyboardInterrupt:
            for sender in senders:
                with contextlib.suppress(SenderDied):  # a sender that has finished is gone
                    sender.send(None)
            with contextlib.suppress(TimeoutError):
                return sent.result(_STOPPED_S)
            raise


def _read(senders: Sequence["_SenderProcess"], on_end: OnEnd) -> list[_Sent]:
    """Report each end as it comes; return what each sender has sent once all have finished. Raises SenderDied."""
    sent, running = list[_Sent](), list(senders)
    while running:
        spoke = wait([sender.connection for sender in running])
        for sender in [sender for sender in running if sender.connection in spoke]:
            message = sender.receive()
            if isinstance(message, _Sent):
                sent.append(message)
                running.remove(sender)
            else:
                on_end(message)
    return sent


def _split(concurrency: int | None, num: int) -> list[int | None]:
    if concurrency is None:
        return [None] * num
    return [(concurrency + index) // num for index in range(num)]


class _SenderProcess:
    """A process that sends its share of the jobs, with its own connection, so that one that dies blocks no other.

    It receives (plan, jobs, concurrency), reports that it is ready, receives the time to begin, reports the latencies
    of each end, and at last its _Sent. Any further message stops it."""

    def __init__(self):
        context = multiprocessing.get_context("spawn")  # grpc does not survive a fork
        self.connection, theirs = context.Pipe()
        self._process = context.Process(target=_process, args=(theirs,), daemon=True)
        self._process.start()
        theirs.close()  # so that the process's end closes the connection

    def close(self) -> None:
        self._process.kill()
        self._process.join()
        self.connection.close()

    def send(self, message: object) -> None:
        """Send a message. Raises SenderDied."""
        try:
            self.connection.send(message)
        except OSError:
            raise self._died() from None

    def receive(self) -> Any:
        """Return the next message. Raises SenderDied."""
        try:
            return self.connection.recv()
        except (EOFError, OSError):
            raise self._died() from None

    def _died(self) -> SenderDied:
        self._process.join(_STOPPED_S)
        code = self._process.exitcode or 0
        how = f"was ended by {signal.Signals(-code).name}" if code < 0 else f"ended with status {code}"
        return SenderDied(f"a sender process {how} before its requests had: nothing is known of them")


def _process(connection: Connection) -> None:
    # Ctrl-C reaches all processes of a terminal; the parent says when to stop
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    plan, jobs, concurrency = connection.recv()

    def begin_when_ready() -> float:
        connection.send(None)
        return connection.recv()

    connection.send(_send(plan, jobs, concurrency, begin_when_ready, connection.send, connection.poll))
