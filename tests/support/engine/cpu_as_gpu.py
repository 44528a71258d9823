"""Ranks of GPUs on a CPU: gloo in place of NCCL, Triton's interpreter in place of its compiler, and graphs that compute
again. As a program it is one rank."""

import os
from types import SimpleNamespace

os.environ.setdefault("TRITON_INTERPRET", "1")  # read when triton is first imported

import torch

from baton.engine.core.device import Memory
from baton.engine.execute import launcher
from baton.engine.gpu_ranks.program import serve
from baton.engine.layers.linear.gpu import GpuChoice
from baton.engine.layers.linear.selection import choose
from baton.engine.models import loader
from baton.engine.speculation.proposers import eagle, medusa
from tests.support.engine.graphs import replay_by_computing
from tests.support.native import interpreter

MEMORY = 1 << 20  # bytes of each device


class Event:
    """Passed once it is waited for."""

    def record(self, stream=None) -> None:
        self.recorded = True

    def synchronize(self) -> None:
        assert self.recorded


def choose_linear(name: str, batch_invariant: bool, dtype: torch.dtype, device: torch.device):
    """As `choose` of layers/linear, but that `triton` is one of the kernels."""
    if name != "triton":
        return choose(name, batch_invariant, dtype, device)
    made = GpuChoice(name, batch_invariant, dtype, device)
    return made, made.reasons


def stand_in(replace) -> None:
    """Replace what needs a device, by `replace(object, name, value)`."""
    for module, name in ((loader, "choose_linear"), (medusa, "choose"), (eagle, "choose")):
        replace(module, name, choose_linear)
    replace(torch.cuda, "Event", Event)
    replace(torch.cuda, "get_device_name", lambda device=None: "stand-in")
    replace(torch.cuda, "current_stream", lambda device=None: SimpleNamespace(synchronize=lambda: None))
    replace(torch.cuda, "synchronize", lambda device=None: None)
    replace(torch.cuda, "reset_peak_memory_stats", lambda device=None: None)
    for name in ("memory_allocated", "max_memory_allocated"):
        replace(torch.cuda, name, lambda device=None: 0)
    replace(Memory, "of", lambda device: Memory(total=MEMORY, free=MEMORY, ours=0))
    replace(launcher, "CudaCapture", lambda stream: replay_by_computing)
    replace(launcher, "chunk_sizes", lambda most: [])  # of 64 rows and more: seconds in the interpreter
    replace(launcher, "warm_steps", lambda *sizes: [])


if __name__ == "__main__":
    interpreter.do_once(setattr)
    stand_in(setattr)
    serve()
