"""Start the ranks of an engine beside its own process, and notice when one of them is lost.

leader   its own Collectives; each rank's stdin, whose end tells that rank to go, and stdout, which says once that it is
         ready, or why not
rank     python -m baton.engine.ranks: a JSON line on stdin says what it is (see Assignment)
"""

import json
import mmap
import os
import select
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import IO, Protocol

from baton import system
from baton.engine import native
from baton.engine.core.config import EngineConfig
from baton.engine.parallel.collectives import Collectives, num_bytes_for
from baton.engine.parallel.shard import Shard

START_S = 600.0  # for all ranks to read their parts
BEAT_S = 0.1
MISSED_BEATS = 15  # without a sign of life while the watching thread itself ran: 1.5 s
END_S = 2.0


class SharedMemory(Protocol):
    """Memory with a file behind it, which ranks map."""

    @property
    def memory(self) -> memoryview: ...

    @property
    def fd(self) -> int: ...


class OwnMemory:
    """Zeroed memory that processes which are started here can map."""

    def __init__(self, num_bytes: int):
        self.fd, read_only = system.shared_memory(num_bytes)
        os.close(read_only)
        self.memory = memoryview(mmap.mmap(self.fd, num_bytes))


@dataclass(frozen=True, slots=True)
class Assignment:
    """What a rank is told on its stdin. Descriptors are inherited."""

    config: EngineConfig  # resolved
    shard: Shard
    collectives_fd: int
    pool_fd: int
    pool_bytes: int

    def line(self) -> str:
        """Return it as one line of JSON."""
        return json.dumps(asdict(self), default=str)

    @classmethod
    def parse(cls, line: str) -> "Assignment":
        """Return what `line` gives."""
        fields = json.loads(line)
        config = fields["config"] | {"model": Path(fields["config"]["model"])}
        return cls(**fields | {"config": EngineConfig(**config), "shard": Shard(**fields["shard"])})


class Ranks:
    """All ranks of an engine but its own, which is the first. `wait` once; `close` ends them. From `wait` on a thread watches
    them: where one has died or stands still every wait for it ends with RankLost."""

    def __init__(self, config: EngineConfig, pool: SharedMemory):
        """Start them; `config` is resolved. Raises ValueError where there is no native library."""
        if native.library() is None:
            raise ValueError(f"tensor_parallel {config.tensor_parallel}: needs the native kernels: {native.reason()}")
        degree = config.tensor_parallel
        self._memory = OwnMemory(num_bytes_for(degree))
        shards = [Shard(rank, degree, config.expert_parallel) for rank in range(degree)]
        self.collectives = Collectives(self._memory.memory, shards[0])
        self.num_bytes: list[int] = []  # of weights, of each rank that was started
        self._closing, self._lock = threading.Event(), threading.Lock()
        self._reason, self._on_lost = "", lambda reason: None
        self._watcher = threading.Thread(target=self._watch, name="ranks", daemon=True)
        self._processes = []
        for shard in shards[1:]:
            given = Assignment(config, shard, self._memory.fd, pool.fd, len(pool.memory))
            self._processes.append(_start(given))

    @property
    def words(self) -> str:
        """Return the words for the engine's start line."""
        sizes = "+".join(f"{num_bytes / (1 << 20):.1f}" for num_bytes in self.num_bytes)
        return f"beside {len(self.pids)} more ranks with {sizes} MiB in kernels"

    @property
    def pids(self) -> list[int]:
        """Return the processes, in order."""
        return [process.pid for process in self._processes]

    def wait(self) -> None:
        """Until every rank has its part of the model. Raises ValueError, one line, where one does not get it."""
        deadline = time.monotonic() + START_S
        for rank, process in enumerate(self._processes, 1):
            said = _read_line(process, deadline)
            if said is None:
                self.close()
                raise ValueError(f"rank {rank} was not ready {START_S:.0f} s after its start")
            if not said:
                status = process.wait()
                self.close()
                raise ValueError(f"rank {rank} ended at its start with status {status}: see its lines on stderr")
            found = json.loads(said)
            if "error" in found:
                self.close()
                raise ValueError(f"rank {rank}: {found['error']}")
            self.num_bytes.append(found["num_bytes"])
        self._watcher.start()

    def when_lost(self, on_lost: Callable[[str], None]) -> None:
        """Call `on_lost(reason)`, once and mostly in another thread, when a rank is lost."""
        with self._lock:
            self._on_lost, reason = on_lost, self._reason
        if reason:
            on_lost(reason)

    def close(self) -> None:
        """End the ranks. Idempotent."""
        self._closing.set()
        if self._watcher.is_alive() and self._watcher is not threading.current_thread():
            self._watcher.join()
        self.collectives.lose()
        for process in self._processes:
            with suppress(BrokenPipeError):  # it has ended before it was told what it is
                _stdin(process).close()
        deadline = time.monotonic() + END_S
        for process in self._processes:
            try:
                process.wait(max(0.0, deadline - time.monotonic()))
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
            _stdout(process).close()

    def _watch(self) -> None:
        ranks = range(1, len(self._processes) + 1)
        beats, missed = dict.fromkeys(ranks, -1), dict.fromkeys(ranks, 0)
        while not self._closing.wait(BEAT_S):
            for rank, process in zip(ranks, self._processes, strict=True):
                beat = self.collectives.beat_of(rank)
                missed[rank] = missed[rank] + 1 if beat == beats[rank] else 0
                beats[rank] = beat
                if (status := process.poll()) is not None:
                    why = f"was killed by signal {-status}" if status < 0 else f"ended with status {status}"
                elif missed[rank] >= MISSED_BEATS:
                    why = f"stands still for {MISSED_BEATS * BEAT_S:.1f} s"
                else:
                    continue
                self._lost(f"rank {rank} (pid {process.pid}) {why}")
                return

    def _lost(self, reason: str) -> None:
        self.collectives.lose()
        for process in self._processes:
            process.kill()  # one that stands still would outlive this process
        with self._lock:
            self._reason, on_lost = reason, self._on_lost
        on_lost(reason)


def _start(given: Assignment) -> subprocess.Popen:
    process = subprocess.Popen(
        [sys.executable, "-m", "baton.engine.ranks"], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
        pass_fds=(given.collectives_fd, given.pool_fd), start_new_session=True,  # Ctrl-C is the leader's, which drains
    )  # fmt: skip
    with suppress(BrokenPipeError):  # it has ended: `wait` says so
        os.write(_stdin(process).fileno(), f"{given.line()}\n".encode())
    return process


def _read_line(process: subprocess.Popen, deadline: float) -> str | None:
    """Return what a rank says; "" where it has ended, None where it says nothing in time. It writes whole lines."""
    ready, _, _ = select.select([_stdout(process)], [], [], max(0.0, deadline - time.monotonic()))
    return _stdout(process).readline() if ready else None


def _stdin(process: subprocess.Popen) -> IO[str]:
    assert process.stdin is not None
    return process.stdin


def _stdout(process: subprocess.Popen) -> IO[str]:
    assert process.stdout is not None
    return process.stdout
