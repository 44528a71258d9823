"""Start the ranks of an engine beside its own process, and notice when one of them is lost."""

import mmap
import os
import socket
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import NamedTuple, Protocol

import torch

from baton import system
from baton.engine import native
from baton.engine.core.config import EngineConfig
from baton.engine.models.linears import WeightReport
from baton.engine.parallel.collectives import Collectives, num_bytes_for
from baton.engine.parallel.pipeline import PipelineLeader, rows_over
from baton.engine.parallel.shard import Shard
from baton.engine.parallel.stage import PipelineStage
from baton.engine.parallel.stream import RankStream, SocketStream
from baton.engine.parallel.sums import SumSpeed
from baton.engine.ranks.build_digest import build_digest
from baton.engine.ranks.process import Assignment, RankProcess, Ready

START_S = 600.0  # for all ranks to read their parts
BEAT_S = 0.1
# The same for a rank that waits for a core for at least a quarter of the time: beside many busy processes a rank was
# silent for 1.5 s.
MISSED_BEATS_OF_BUSY_HOST = 150
END_S = 2.0


class SharedMemory(Protocol):
    """Provide memory with a file behind it, which ranks map."""

    @property
    def memory(self) -> memoryview:
        """Return the memory, writable."""
        ...

    @property
    def fd(self) -> int:
        """Return the descriptor of its file."""
        ...


class OwnMemory:
    """Hold zeroed memory that child processes can map."""

    def __init__(self, num_bytes: int):
        self.fd, read_only = system.shared_memory(num_bytes)
        os.close(read_only)
        self.memory = memoryview(mmap.mmap(self.fd, num_bytes))


class Rank(Protocol):
    """Describe a rank other than the first; ranks/process.py implements it for this host."""

    still: str  # words for a rank that gives no sign of life
    missed_beats: int  # so many in a row, while the watching thread itself runs, mean that the rank is lost

    @property
    def where(self) -> str:
        """Return where people find it."""
        ...

    def missing(self, seconds: float) -> str:
        """Return the words for a rank that has been silent for `seconds`."""
        ...

    def next_message(self, deadline: float) -> dict | str | None:
        """Wait for a message until `deadline` (time.monotonic()); None: none came; a str says why the rank ended."""
        ...

    def ended(self) -> str:
        """Return how it ended; "" while it runs."""
        ...

    def core_wait_s(self) -> float:
        """Return the seconds that its threads have waited for a core; 0 if unknown."""
        ...

    def ask_to_end(self) -> None:
        """Ask it to exit."""
        ...

    def kill(self) -> None:
        """End it without its help."""
        ...

    def end(self, deadline: float) -> None:
        """Wait until it has ended; kill it at `deadline` (time.monotonic())."""
        ...


class JoinedRank(Rank, Protocol):
    """Describe a rank of another host."""

    @property
    def stream(self) -> RankStream:
        """Return the connection to its program, for the rows of steps."""
        ...


class Joining(Protocol):
    """Accept ranks of other hosts."""

    def place(self, given: Assignment) -> JoinedRank:
        """Offer an assignment to the next rank that joins."""
        ...


class RankGroup(Protocol):
    """Describe the first rank's end of what joins all ranks."""

    @property
    def degree(self) -> int:
        """Return the number of ranks."""
        ...

    def beat_of(self, rank: int) -> int:
        """Return a number that grows while a rank runs."""
        ...

    def waited_s(self, rank: int) -> float:
        """Return for how many seconds a rank has waited for others."""
        ...

    def lose(self) -> None:
        """Make every wait for a rank end with RankLost."""
        ...


class Ranks:
    """Hold all ranks of an engine except its own, which is the first. Call `wait` once; `close` ends them. From `wait`
    on a thread watches them: if one has died or stands still, every wait for it ends with RankLost."""

    def __init__(self, group: RankGroup, processes: Sequence[Rank]):
        self.group = group
        self.reports: list[WeightReport] = []  # of all ranks, the first one included
        self.sums: SumSpeed | None = None  # of ranks that share layers, once they are ready
        self._closing, self._lock = threading.Event(), threading.Lock()
        self._reason, self._on_lost = "", lambda reason: None
        self._watcher = threading.Thread(target=self._watch, name="ranks", daemon=True)
        self._processes = list(processes)

    @property
    def summary(self) -> str:
        """Return the words on ranks for the engine's start line."""
        held, read = (
            "+".join(f"{num_bytes / (1 << 20):.1f}" for num_bytes in sizes)
            for sizes in (self.num_bytes, [report.read_bytes for report in self.reports])
        )
        return f"beside {len(self._processes)} more ranks with {held} MiB in kernels (all read {read} MiB)"

    def why_lost(self) -> str:
        """Return why a rank was lost, as soon as that is known; "" if none was."""
        if self._watcher.is_alive():
            self._watcher.join(2 * BEAT_S * max(process.missed_beats for process in self._processes))
        return self._reason

    @property
    def places(self) -> list[str]:
        """Return where people find all ranks, in order."""
        return [f"pid {os.getpid()}", *(process.where for process in self._processes)]

    @property
    def numa_nodes(self) -> list[list[int]]:
        """Return the memory nodes whose cores each of them may use; unknown for ranks of other hosts."""
        others = (system.numa_nodes(each.pid) if isinstance(each, RankProcess) else [] for each in self._processes)
        return [system.numa_nodes(os.getpid()), *others]

    @property
    def others(self) -> list[Rank]:
        """Return all ranks except the first, in order."""
        return list(self._processes)

    @property
    def num_bytes(self) -> list[int]:
        """Return the bytes of weights of each rank that was started."""
        return [report.num_bytes for report in self.reports[1:]]

    @property
    def pids(self) -> list[int]:
        """Return the process ids of this host's ranks, in order."""
        return [process.pid for process in self._processes if isinstance(process, RankProcess)]

    def wait(self, own: Ready) -> None:
        """Wait until every rank has its part of the model; `own`: what the first one has read. Raises ValueError, in
        one line, if a rank fails."""
        deadline = time.monotonic() + START_S
        self.reports.append(own.weights)
        for rank, process in enumerate(self._processes, 1):
            message = process.next_message(deadline)
            if not isinstance(message, dict):
                self.close()
                raise ValueError(f"rank {rank} {process.missing(START_S) if message is None else message}")
            if "error" in message:
                self.close()
                raise ValueError(f"rank {rank}: {message['error']}")
            ready = Ready.parse(message)
            if ready.computes != own.computes:
                self.close()
                theirs, ours = ("/".join(each.computes) for each in (ready, own))
                raise ValueError(f"rank {rank} computes by {theirs}, rank 0 by {ours}: their bits would differ")
            self.reports.append(ready.weights)
        self._watcher.start()

    def when_lost(self, on_lost: Callable[[str], None]) -> None:
        """Call `on_lost(reason)`, once and usually in another thread, when a rank is lost."""
        with self._lock:
            self._on_lost, reason = on_lost, self._reason
        if reason:
            on_lost(reason)

    def close(self) -> None:
        """End the ranks. Idempotent."""
        self._closing.set()
        if self._watcher.is_alive() and self._watcher is not threading.current_thread():
            self._watcher.join()
        self.group.lose()
        for process in self._processes:
            process.ask_to_end()
        deadline = time.monotonic() + END_S
        for process in self._processes:
            process.end(deadline)

    def _watch(self) -> None:
        ranks = range(1, len(self._processes) + 1)
        beats, missed, waited_s = dict.fromkeys(ranks, -1), dict.fromkeys(ranks, 0), dict.fromkeys(ranks, 0.0)
        while not self._closing.wait(BEAT_S):
            for rank, process in zip(ranks, self._processes, strict=True):
                beat = self.group.beat_of(rank)
                missed[rank] = missed[rank] + 1 if beat == beats[rank] else 0
                beats[rank] = beat
                if missed[rank] == 1:
                    waited_s[rank] = process.core_wait_s()
                if not (why := process.ended()):
                    if missed[rank] < process.missed_beats:
                        continue
                    is_busy = process.core_wait_s() - waited_s[rank] > missed[rank] * BEAT_S / 4
                    if is_busy and missed[rank] < MISSED_BEATS_OF_BUSY_HOST:
                        continue
                    why = f"{process.still} for {missed[rank] * BEAT_S:.1f} s"
                self._lost(f"rank {rank} ({process.where}) {why}")
                return

    def _lost(self, reason: str) -> None:
        self.group.lose()
        for process in self._processes:
            process.kill()  # a process that stands still would outlive this one
        with self._lock:
            self._reason, on_lost = reason, self._on_lost
        on_lost(reason)


class RankGrid:
    """Join all ranks of all stages as a RankGroup; the first stage's ranks come first."""

    def __init__(self, groups: Sequence[Collectives], pipeline: PipelineLeader | None, degree: int):
        """Join `degree` ranks: `groups` of the ranks of each stage, if stages have several."""
        self.degree = degree
        self._groups, self._pipeline = groups, pipeline
        self._width = groups[0].degree if groups else 1

    def beat_of(self, rank: int) -> int:
        stage, shard = divmod(rank, self._width)
        if self._groups:
            return self._groups[stage].beat_of(shard)
        assert self._pipeline is not None
        return self._pipeline.beat_of(stage)

    def waited_s(self, rank: int) -> float:
        stage, shard = divmod(rank, self._width)
        for_ranks = self._groups[stage].waited_s(shard) if self._groups else 0.0
        for_stages = self._pipeline.waited_s(stage) if self._pipeline is not None and shard == 0 else 0.0
        return for_ranks + for_stages

    def lose(self) -> None:
        for group in self._groups:
            group.lose()
        if self._pipeline is not None:
            self._pipeline.lose()


class Started(NamedTuple):
    """Hold the other ranks, and the first one's ends."""

    ranks: Ranks
    collectives: Collectives | None  # with the ranks that share its layers
    pipeline: PipelineLeader | None  # with the other stages


def start_ranks(
    config: EngineConfig,
    pool: SharedMemory,
    stages: Sequence[PipelineStage],
    sizes: tuple[int, torch.dtype],
    identity: str,
    joining: Joining | None,
) -> Started:
    """Start the ranks of all stages, except the first rank of the first; `config` is resolved. `joining`: the source of
    ranks of other hosts, whose model must be `identity`. `sizes`: elements of a row, and their dtype. Raises ValueError
    if layers are shared without a native library, or if no rank can join."""
    degree, (hidden_size, dtype) = config.tensor_parallel, sizes
    if degree > 1 and native.library() is None:
        raise ValueError(f"tensor_parallel {degree}: needs the native kernels: {native.unavailable()}")
    if config.remote_stages and joining is None:
        raise ValueError("remote_stages: there is no port where ranks of other hosts could join")
    rows = OwnMemory(config.num_rows * hidden_size * dtype.itemsize)
    ranks: list[Rank] = []
    streams: list[RankStream] = []
    groups: list[Collectives] = []
    for stage in stages[: len(stages) - config.remote_stages]:
        given = Assignment(config, pool.fd, len(pool.memory), stage=stage if len(stages) > 1 else None)
        if degree > 1:
            memory = OwnMemory(num_bytes_for(degree))
            groups.append(
                Collectives(memory.memory, Shard(0, degree, config.expert_parallel), config.all_reduce == "fast")
            )
            given = replace(given, memory_fd=memory.fd, memory_bytes=len(memory.memory))
        if stage.index:
            own, theirs = socket.socketpair()
            streams.append(SocketStream(own))
            maps = {"rows_fd": rows.fd, "rows_bytes": len(rows.memory), "stream_fd": theirs.fileno()}
            with theirs:
                ranks.append(RankProcess(replace(given, shard=Shard(0, degree, config.expert_parallel), **maps)))
        shards = [Shard(rank, degree, config.expert_parallel) for rank in range(1, degree)]
        ranks.extend(RankProcess(replace(given, shard=shard)) for shard in shards)
    for stage in stages[len(stages) - config.remote_stages :]:
        assert joining is not None
        rank = joining.place(Assignment(config, stage=stage, identity=identity, build=build_digest()))
        ranks.append(rank)
        streams.append(rank.stream)
    pipeline = PipelineLeader(streams, rows_over(rows.memory, hidden_size, dtype)) if streams else None
    grid = RankGrid(groups, pipeline, 1 + len(ranks))
    return Started(Ranks(grid, ranks), groups[0] if groups else None, pipeline)
