"""Keep one program running as a child process: restarted with growing pauses when it dies, drained at the end.

A child never outlives this process: it leads its own process group, and on Linux the kernel kills it when this process
dies."""

from __future__ import annotations

import asyncio
import os
import re
import signal
import sys
import time
from asyncio.subprocess import SubprocessStreamProtocol
from collections.abc import AsyncIterator, Callable, Mapping
from typing import NamedTuple

from baton import system
from baton.cli.launch.placing.log import log
from baton.protocol import AWAY, KEEPER_VARIABLE, RESTARTS, STAYS_AWAY
from baton.service.exits import WRONG_USE
from baton.service.logs import NAME_VARIABLE
from baton.service.progress import PREFIX

_KEEPER_LINE = re.compile(r"ready(?: [a-z_]+=\S+)+|draining next=\S+")  # lines that are for the keeper
_LINE_BYTES, _GIB = 1 << 20, 1 << 30
_HOLD_S = 30.0  # a start that takes longer should be watched
_KILLED_S = 5.0  # in which a killed process ends, unless its GPU's driver holds it
_LAST_WORDS_S = 1.0  # after its end, in which its last output is read


class StartError(Exception):
    """A program ended before it was ready for the first time. `status` is 1 (failed) or 2 (wrong use)."""

    def __init__(self, message: str, status: int):
        super().__init__(message)
        self.status = status


class Life(NamedTuple):
    """The state of a program: starting, serving, lost (it restarts), draining (it will be gone), gone (it stays away)
    or failed (at its first start). `fields` are those of its ready line; `status` is that of StartError."""

    state: str
    fields: Mapping[str, str] = {}
    reason: str = ""
    status: int = 0


class Keeper:
    """Keeps one program running. `await started` returns the fields of its first `ready key=value ...` line, or raises
    StartError."""

    def __init__(
        self,
        name: str,
        argv: list[str],
        env: Mapping[str, str] | None = None,
        on_change: Callable[[Life], None] = lambda life: None,
        *,
        pause_s: float = 0.5,
        max_pause_s: float = 30.0,
        settled_s: float = 60.0,
    ):
        """Start the program. It restarts `pause_s` after it dies; each earlier death doubles the pause, until it has
        run for `settled_s`. `env` is added to the variables of this process."""
        self.name, self.argv, self.env = name, argv, dict(env or {})
        self._on_change = on_change
        self._pause_s, self._max_pause_s, self._settled_s = pause_s, max_pause_s, settled_s
        self.started: asyncio.Future[dict[str, str]] = asyncio.get_running_loop().create_future()
        # the exception may never be read
        self.started.add_done_callback(lambda future: future.cancelled() or future.exception())
        self._child: _Child | None = None
        self._stopping = asyncio.Event()
        self._task = asyncio.create_task(self._keep())

    async def stop(self, drain_s: float) -> bool:
        """Send SIGTERM, and SIGKILL to its group after `drain_s`. Return whether it ended by itself."""
        self._stopping.set()
        self._signal(signal.SIGTERM)
        done, _ = await asyncio.wait([self._task], timeout=drain_s)
        if not done:
            self.kill()
            await asyncio.wait([self._task], timeout=_KILLED_S)
        return bool(done)

    def kill(self) -> None:
        """Send SIGKILL to its group immediately."""
        self._stopping.set()
        self._signal(signal.SIGKILL)

    async def _keep(self) -> None:
        pause_s = self._pause_s
        while not self._stopping.is_set():
            begin = time.monotonic()
            try:
                ended = await self._run()
            except (OSError, RuntimeError) as error:  # no process, descriptor or thread was left
                ended = f"could not be started: {_describe(error)}"
                if not self.started.done():
                    self._fail(StartError(f"{self.name} {ended}", 1))
            if self._stopping.is_set() or not self.started.done() or self.started.exception():
                break
            if self._child and self._child.status == STAYS_AWAY:
                log(f"baton: {self.name} was drained and stays away: it is not started again")
                self._on_change(Life("gone", reason=ended))
                break
            pause_s = self._pause_s if time.monotonic() - begin >= self._settled_s else pause_s
            log(f"baton: {self.name} {ended}; it starts again in {pause_s:g} s")
            self._on_change(Life("lost", reason=ended))
            await _wait(self._stopping, pause_s)
            pause_s = min(2 * pause_s, self._max_pause_s)
        if not self.started.done():
            self.started.cancel()

    async def _run(self) -> str:
        """Run the process once, and return how it ended, in words. Raises OSError or RuntimeError if it cannot be
        started."""
        self._child = await _Child.spawn(self.argv, {**self.env, NAME_VARIABLE: self.name})
        self._on_change(Life("starting"))
        if self._stopping.is_set():
            self._signal(signal.SIGTERM)
        return await self._live(self._child)

    async def _live(self, child: _Child) -> str:
        """Follow a process from its start to its end; return how it ended, in words."""
        async for word, fields in child.keeper_lines():
            if word == "draining":
                self._on_change(_life_after_drain(fields["next"]))
                continue
            if not self.started.done():
                self.started.set_result(fields)
            self._on_change(Life("serving", fields))
        ended = await child.ended()
        if self.started.done():
            child.release()
            return ended
        words, end = child.last_words(), f"{self.name} {ended}"
        reason = "\n".join(filter(None, (words, end))) if child.limit else words or end
        if not self._stopping.is_set():  # otherwise the user hears of the signal or failure that caused the stop
            self._fail(StartError(reason, 2 if child.status == WRONG_USE else 1))
        return ended

    def _fail(self, error: StartError) -> None:
        self.started.set_exception(error)
        self._on_change(Life("failed", reason=str(error), status=error.status))

    def _signal(self, number: int) -> None:
        if self._child is not None:
            self._child.signal(number)


class _Streams(SubprocessStreamProtocol):
    """The output of a program. `exited` is set when it exits, even if other processes hold its pipes. `is_given_up`:
    the program is killed as soon as its id is known, since nobody would be told of its end."""

    def __init__(self) -> None:
        super().__init__(_LINE_BYTES, asyncio.get_running_loop())
        self.exited = asyncio.Event()
        self.is_given_up = False

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        super().connection_made(transport)
        if self.is_given_up:
            assert isinstance(transport, asyncio.SubprocessTransport)
            os.killpg(transport.get_pid(), signal.SIGKILL)
            transport.get_extra_info("subprocess").wait()
            transport.close()

    def process_exited(self) -> None:
        super().process_exited()
        self.exited.set()


class _Child:
    """One run of a program. Its stderr is held back until it is ready, so that a failed start is one line, but only for
    some seconds."""

    def __init__(self, transport: asyncio.SubprocessTransport, streams: _Streams, before: system.GroupEvents):
        """Follow the process. `before` has the counts of its control group from before its start."""
        self._transport, self._streams, self._before = transport, streams, before
        self.limit = ""  # the limit of its control group that may have ended it, in words
        self._held: list[str] | None = []
        self._stderr = asyncio.create_task(self._pump_stderr())
        self._ending = asyncio.create_task(self._watch_end())
        self._timer = asyncio.get_running_loop().call_later(_HOLD_S, self.release)

    @classmethod
    async def spawn(cls, argv: list[str], env: Mapping[str, str]) -> _Child:
        before, streams = system.group_events(), _Streams()
        try:
            transport, _ = await asyncio.get_running_loop().subprocess_exec(
                lambda: streams,
                *(sys.executable, "-IS", "-c", system.RUN_WITH_PARENT, str(os.getpid())),
                *argv,
                stdin=asyncio.subprocess.DEVNULL,
                env={**os.environ, **env, "PYTHONUNBUFFERED": "1", KEEPER_VARIABLE: "baton up"},
                start_new_session=True,
            )
        except (OSError, RuntimeError):
            # The process may run: after the fork, asyncio still has to get a thread or descriptor to wait for the
            # child.
            streams.is_given_up = True
            raise
        return cls(transport, streams, before)

    @property
    def status(self) -> int | None:
        return self._transport.get_returncode()

    async def keeper_lines(self) -> AsyncIterator[tuple[str, dict[str, str]]]:
        """Yield the word and the fields of each line for the keeper, `ready ...` or `draining ...`, until the child
        closes its stdout."""
        assert self._streams.stdout is not None  # it is a pipe
        async for line in _lines(self._streams.stdout):
            if _KEEPER_LINE.fullmatch(line):
                self.release()
                word, *fields = line.split()
                yield word, dict(field.split("=", 1) for field in fields)
            else:
                log(line)

    async def ended(self) -> str:
        await self._streams.exited.wait()
        await self._stderr
        self._ending.cancel()
        self.signal(signal.SIGKILL)  # also ends processes that it has started
        status = self.status
        assert status is not None  # it has exited
        how = f"was killed by {signal.Signals(-status).name}" if status < 0 else f"ended with status {status}"
        self.limit = self._limit_met(status)
        return f"{how}: {self.limit}" if self.limit else how

    def _limit_met(self, status: int) -> str:
        """Return the limit that may have caused this end, with advice; "" if none. The kernel counts for the whole
        group, so another process of it may have met the limit."""
        now = system.group_events()
        if status == -signal.SIGKILL and now.num_killed > self._before.num_killed:
            has = f"memory, of which this host or container has {system.memory_limit() / _GIB:.1f} GiB, ran out since it started"
            return f"{has} and may have ended it; give fewer workers or --num-blocks, --quantization int8, or a larger limit"
        if status not in (0, WRONG_USE, STAYS_AWAY, -signal.SIGKILL) and now.num_refused > self._before.num_refused:
            has = "its group's limit of threads (pids.max, TasksMax of systemd) was met since it started and may have ended it"
            return f"{has}; give a larger one, or fewer workers"
        return ""

    async def _watch_end(self) -> None:
        """Close the child's pipes once it has exited: processes that it started hold them too, and readers wait for
        their end."""
        await self._streams.exited.wait()
        self.signal(signal.SIGKILL)
        await asyncio.sleep(_LAST_WORDS_S)
        self._transport.close()

    def signal(self, number: int) -> None:
        try:
            if number == signal.SIGKILL:
                os.killpg(self._transport.get_pid(), number)
            elif self.status is None:
                # Not send_signal, which polls: it would reap a child that has just died, and asyncio would lose its
                # status ("Unknown child process pid ...").
                os.kill(self._transport.get_pid(), number)
        except ProcessLookupError:
            pass

    def release(self) -> None:
        """Print the lines that were held back, and hold back no more."""
        self._timer.cancel()
        held, self._held = self._held, None
        for line in held or ():
            log(line)

    def last_words(self) -> str:
        """Return the line that says why it did not start, or all lines of a crash; "" if they were printed already."""
        self._timer.cancel()
        held, self._held = self._held or [], None
        return "\n".join(held) if any(line.startswith("Traceback") for line in held) else (held or [""])[-1]

    async def _pump_stderr(self) -> None:
        assert self._streams.stderr is not None  # it is a pipe
        async for line in _lines(self._streams.stderr):
            if self._held is None or line.startswith(PREFIX):
                log(line)
            else:
                self._held.append(line)


async def _lines(stream: asyncio.StreamReader):
    while True:
        try:
            line = await stream.readline()
        except ValueError:  # a line longer than the limit is dropped
            continue
        if not line:
            return
        yield line.decode(errors="replace").rstrip("\r\n")


def _life_after_drain(follows: str) -> Life:
    """Return the state of a program that has said what follows its drain: AWAY, RESTARTS, or a role that it takes."""
    if follows == AWAY:
        return Life("draining")
    return Life("lost", {} if follows == RESTARTS else {"role": follows}, "drains, then starts again")


def _describe(error: OSError | RuntimeError) -> str:
    if isinstance(error, RuntimeError):
        return str(error)
    return f"{f'{error.filename}: ' if error.filename else ''}{error.strerror}"


async def _wait(event: asyncio.Event, timeout_s: float) -> None:
    try:
        await asyncio.wait_for(event.wait(), timeout_s)
    except TimeoutError:
        pass
