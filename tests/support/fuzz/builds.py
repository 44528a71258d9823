"""A stack some of whose processes run another checkout of this repository, as amid an upgrade: half of each role to
begin with, and any of them comes back as the other build (`swap`)."""

import random
import sys
from collections.abc import Sequence
from pathlib import Path

from tests.support.fork_server.processes import ForkServer
from tests.support.fuzz.shrink import Plan
from tests.support.fuzz.stacks import FuzzStack, Run, Stacks, stack_plan
from tests.support.process import ROOT, Process

OTHERS = {"gateway0", "prefill1", "decode0"}  # at first
FAULTS = ("swap", "swap", "swap", "kill", "reset", "role", "redis flush")


def builds_plan(seed: int, num_requests: int = 120, num_faults: int = 5) -> Plan:
    """Return a plan with one fault in some twenty requests, half of them upgrades or the way back."""
    draw = random.Random(seed)
    faults = [[draw.randrange(num_requests), draw.choice(FAULTS), draw.randrange(4), 100] for _ in range(num_faults)]
    return {**stack_plan(seed, num_requests), "faults": sorted(faults)}


class MixedStacks(Stacks):
    """`with MixedStacks(model, folder, other) as stacks`; `other`: a checkout of another commit."""

    def __init__(self, model: Path, folder: Path, other: Path):
        super().__init__(model, folder, type("OfTwoBuilds", (MixedStack,), {"other": other.resolve()}), MixedRun)


class MixedStack(FuzzStack):
    """Processes of two checkouts."""

    other: Path

    def __enter__(self) -> "MixedStack":
        self._elsewhere = set(OTHERS)
        self.folder.mkdir(parents=True, exist_ok=True)
        self._other_fork_server = _OtherForkServer(self.folder, self.other)
        self._other_fork_server.__enter__()
        return super().__enter__()

    def stop(self) -> dict[str, int]:
        statuses = super().stop()
        self._other_fork_server.__exit__()
        return statuses

    def swap(self, name: str) -> None:
        """Let a process run, from its next life on, the other checkout than now."""
        self._elsewhere ^= {name}

    def _process(self, name: str, argv: list[str], folder: Path) -> Process:
        if name not in self._elsewhere:
            return super()._process(name, argv, folder)
        env = {**self.env, "PYTHONPATH": str(self.other)}
        return self._other_fork_server.process(name, argv, folder, env, self.failpoints)


class MixedRun(Run):
    """One plan on such a stack."""

    async def _swap(self, process: Process, pause_s: float) -> None:
        self._stack.swap(process.name)
        await self._drain(process, pause_s)


class _OtherForkServer(ForkServer):
    """Our program, whose children read another checkout."""

    def __init__(self, folder: Path, other: Path):
        self._path = folder / "other-socket"
        program = ROOT / "tests" / "support" / "fork_server" / "program.py"
        argv = _within(other, [sys.executable, str(program), str(self._path)])
        self._process = Process("other-fork-server", argv, folder, {"OMP_NUM_THREADS": "1"})


def _within(other: Path, argv: Sequence[str]) -> list[str]:
    return ["env", "-C", str(other), f"PYTHONPATH={other}", *argv]
