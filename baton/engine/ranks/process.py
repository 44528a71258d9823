"""One rank as a process of this host. It is told its assignment on stdin, and answers once on stdout that it has its
part of the model or why not. The end of stdin tells it to exit. A rank of another host is told and says the same over a
connection that is handed in."""

import json
import os
import select
import subprocess
import sys
import time
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import IO

from baton import system
from baton.engine.core.config import EngineConfig
from baton.engine.core.device import instruction_set
from baton.engine.models.decoder import Model
from baton.engine.models.linears import WeightReport
from baton.engine.parallel.shard import WHOLE, Shard
from baton.engine.parallel.stage import PipelineStage


@dataclass(frozen=True, slots=True)
class Assignment:
    """Tell a rank what it is. A rank of this host inherits the descriptors; one of another host has its own memory."""

    config: EngineConfig  # resolved
    pool_fd: int = -1
    pool_bytes: int = 0
    memory_fd: int = -1  # of the collectives of ranks that share its layers
    memory_bytes: int = 0
    rows_fd: int = -1  # of a stage: the rows of a step
    rows_bytes: int = 0
    shard: Shard = WHOLE
    stage: PipelineStage | None = None
    stream_fd: int = -1  # of a stage's first rank: a socket to the first stage; on a GPU: to its worker, for KV
    identity: str = ""  # of the model, if a rank reads its own files
    build: str = ""  # digest of the worker's code, if a rank runs its own code
    device: str = "cpu"
    store: str = ""  # on GPUs: a file through which ranks find each other

    def line(self) -> str:
        """Return the assignment as one line of JSON."""
        stage = self.stage and {"index": self.stage.index, "layers": [self.stage.layers.start, self.stage.layers.stop]}
        return json.dumps(asdict(replace(self, stage=None)) | {"stage": stage}, default=str)

    @classmethod
    def parse(cls, line: str) -> "Assignment":
        """Return the assignment from a `line`."""
        fields = json.loads(line)
        config = fields["config"] | {"model": Path(fields["config"]["model"])}
        if (stage := fields["stage"]) is not None:
            fields["stage"] = PipelineStage(stage["index"], range(*stage["layers"]))
        return cls(**fields | {"config": EngineConfig(**config), "shard": Shard(**fields["shard"])})


@dataclass(frozen=True, slots=True)
class Ready:
    """Report what a rank has read, and with what it computes."""

    weights: WeightReport
    computes: tuple[str, ...]  # attention, layers, instructions: ranks that differ here would differ in bits

    @classmethod
    def of(cls, model: Model) -> "Ready":
        """Return the report of a rank with this part of a model."""
        return cls(model.weights, (model.attention.name, model.layers_name, instruction_set(model.device)))

    def line(self) -> str:
        """Return the report as one line of JSON."""
        return json.dumps(asdict(self))

    @classmethod
    def parse(cls, fields: dict) -> "Ready":
        """Return the report from a line's object."""
        weights = fields["weights"] | {"notes": tuple(fields["weights"]["notes"])}
        return cls(WeightReport(**weights), tuple(fields["computes"]))


class RankProcess:
    """Run one rank as a child process, as the module describes."""

    still = "stands still"
    missed_beats = 15  # 1.5 s

    def __init__(self, given: Assignment, program: str = "baton.engine.ranks"):
        fds = tuple(fd for fd in (given.pool_fd, given.memory_fd, given.rows_fd, given.stream_fd) if fd >= 0)
        self._process = subprocess.Popen(
            [sys.executable, "-m", program], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
            pass_fds=fds, start_new_session=True,  # Ctrl-C goes to the leader, which drains
        )  # fmt: skip
        with suppress(BrokenPipeError):  # it has ended: `next_message` says so
            os.write(self._stdin.fileno(), f"{given.line()}\n".encode())

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def where(self) -> str:
        """Return where people find the process."""
        return f"pid {self.pid}"

    def missing(self, seconds: float) -> str:
        """Return the words for a rank that has been silent for `seconds`."""
        return f"was not ready {seconds:.0f} s after its start"

    def next_message(self, deadline: float) -> dict | str | None:
        """Wait for a message of the rank, which writes whole lines. Return None at `deadline` (time.monotonic()), or a
        str that says why the rank ended."""
        ready, _, _ = select.select([self._stdout], [], [], max(0.0, deadline - time.monotonic()))
        if not ready:
            return None
        if line := self._stdout.readline():
            return json.loads(line)
        return f"ended at its start with status {self._process.wait()}: see its lines on stderr"

    def ended(self) -> str:
        """Return how it ended; "" while it runs."""
        status = self._process.poll()
        if status is None:
            return ""
        return f"was killed by signal {-status}" if status < 0 else f"ended with status {status}"

    def core_wait_s(self) -> float:
        """Return the seconds that its threads have waited for a core; 0 if unknown."""
        return sum(waited for _, waited in system.run_and_wait_ns(pid=self.pid).values()) / 1e9

    def ask_to_end(self) -> None:
        with suppress(BrokenPipeError):  # it ended before it got its assignment
            self._stdin.close()

    def kill(self) -> None:
        self._process.kill()

    def end(self, deadline: float) -> None:
        """Wait until it has ended; kill it at `deadline` (time.monotonic())."""
        try:
            self._process.wait(max(0.0, deadline - time.monotonic()))
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._stdout.close()

    @property
    def _stdin(self) -> IO[str]:
        assert self._process.stdin is not None
        return self._process.stdin

    @property
    def _stdout(self) -> IO[str]:
        assert self._process.stdout is not None
        return self._process.stdout
