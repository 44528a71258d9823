"""Plan the memory of GPUs of several sizes for workers of large models, as a start does, on meta tensors: each worker
has a count of what is allocated in place of torch's allocator, and workers of one GPU see one another's in what is
free. Prints as JSON, by model, GPU and workers: the most that each has had at any time, its pool, and its share; or the
line that ends its start.

    TRITON_INTERPRET=0 python -m tests.engine.execute.meta_memory "8B bf16 48" "70B int4 24"
"""

import json
import sys
import weakref
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from weakref import WeakSet

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from baton.engine import kernels
from baton.engine.attention.triton_paged import MAX_PROGRAMS_PER_PROCESSOR, PROGRAMS_PER_PROCESSOR
from baton.engine.core.config import EngineConfig
from baton.engine.core.device import CONTEXT_BYTES, Memory, check_weights, memory_share
from baton.engine.core.model_spec import LayerSpec, ModelSpec
from baton.engine.execute import build, launcher
from baton.engine.execute.build import EngineParts
from baton.engine.execute.graphs import Outputs
from baton.engine.models.decoder import Model
from tests.engine.execute.meta_steps import META, Recorder, make_model, make_spec

SHOWN = 0.95  # of what a card is sold with
PROCESSORS = 132
CONTEXT = 131072
LAYERS = {"8B": 32, "70B": 80}
# max_num_batched_tokens, max_num_seqs of either role on a GPU
ROLES = {"prefill": (8192, 64), "decode": (2048, 256)}


listed = torch.Tensor.tolist


class Gpu:
    """The memory of one GPU: what each of its workers has."""

    def __init__(self, total: int):
        self.total = total
        self.workers: list[Allocator] = []

    @property
    def free(self) -> int:
        return self.total - sum(CONTEXT_BYTES + worker.allocated + worker.graphs for worker in self.workers)


class Allocator(TorchDispatchMode):
    """Counts the storages that live on the device of one worker. A storage goes back at once: the allocator's cache is
    emptied before anything is read from it."""

    def __init__(self, gpu: Gpu):
        super().__init__()
        self.gpu = gpu
        self.allocated = self.peak = self.most = 0
        self.graphs = 0  # bytes that the pool of captured graphs keeps
        self._seen: WeakSet = WeakSet()
        gpu.workers.append(self)

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        made = function(*args, **(kwargs or {}))
        for tensor in tree_leaves(made):
            if isinstance(tensor, torch.Tensor) and tensor.is_meta:
                self._take(tensor.untyped_storage())
        return made

    def _take(self, storage: torch.UntypedStorage) -> None:
        if storage in self._seen:
            return
        self._seen.add(storage)
        size = storage.nbytes()
        weakref.finalize(storage, self._give_back, size)
        self.allocated += size
        self.peak = max(self.peak, self.allocated)
        self.most = max(self.most, self.allocated + self.graphs)

    def _give_back(self, size: int) -> None:
        self.allocated -= size

    def reset_peak(self, device: torch.device) -> None:
        self.peak = self.allocated

    def capture(self, run: Callable[[], Outputs]) -> tuple[Callable[[], None], Outputs]:
        """As a capture into one pool of memory for all graphs: it keeps the most that any of them took."""
        before = self.allocated
        self.reset_peak(META)
        outputs = run()
        self.graphs = max(self.graphs, self.peak - before)
        return (lambda: None), outputs

    def stand_in(self) -> None:
        """Take the place of the device's allocator."""
        cuda = torch.cuda
        cuda.synchronize = cuda.empty_cache = lambda device=None: None
        cuda.mem_get_info = lambda device: (self.gpu.free, self.gpu.total)
        cuda.memory_reserved = cuda.memory_allocated = lambda device: self.allocated
        cuda.max_memory_allocated = lambda device: self.peak
        cuda.reset_peak_memory_stats = self.reset_peak
        cuda.current_stream = lambda device=None: SimpleNamespace(synchronize=lambda: None)
        launcher.CudaCapture = lambda stream: self.capture
        torch.Tensor.pin_memory = lambda tensor: tensor
        torch.Tensor.tolist = lambda tensor: listed(torch.zeros(tensor.shape, dtype=tensor.dtype, device="cpu"))


def start(name: str, form: str, role: str, worker: Allocator, num_workers: int) -> tuple[EngineParts, dict]:
    """Start a worker as build.py does, and run what it runs before it serves."""
    spec = make_spec(name, CONTEXT)
    whole = replace(spec, layers=(LayerSpec(),) * LAYERS[name])
    num_tokens, num_seqs = ROLES[role]
    config = EngineConfig(
        Path(name), max_num_batched_tokens=num_tokens, max_num_seqs=num_seqs, workers_per_gpu=num_workers
    )

    def load(config: EngineConfig, device: torch.device) -> Model:
        check_weights(
            weight_bytes(whole, form), Memory.of(device), memory_share(config), "none" if form == "bf16" else "auto"
        )
        before = worker.allocated
        # A step takes the same whatever the number of layers: two are run, and of the others there are the weights.
        model = make_model(name, form, config.kv_dtype, config.batch_invariant, CONTEXT)
        others = weight_bytes(whole, form) - weight_bytes(spec, form)
        model.others = torch.empty(others, dtype=torch.uint8, device=META)
        model.kv_layout = whole.kv_layout
        backend = model.attention
        backend._wanted, backend._most = (
            each * PROCESSORS for each in (PROGRAMS_PER_PROCESSOR, MAX_PROGRAMS_PER_PROCESSOR)
        )
        loaded.append(worker.allocated - before)
        return model

    loaded: list[int] = []
    build.load_model = load
    with worker:
        parts = build._on_gpu(config, whole, META, None, lambda config, model: ())
    return parts, {
        "weights": loaded[0], "pool": parts.pool.bytes.numel(), "graphs": worker.graphs, "most": worker.most + CONTEXT_BYTES,
        "share": int(memory_share(config) * worker.gpu.total), "total": worker.gpu.total,
        "context": parts.config.max_model_len, "num_graphs": parts.launcher.num_graphs,
        "num_tokens": num_tokens, "num_seqs": num_seqs,
    }  # fmt: skip


def weight_bytes(spec: ModelSpec, form: str) -> int:
    """Of all linear weights, in bytes: bf16, or four bits with fp32 scales of 128 inputs; embedding and head are
    bf16."""
    heads = (spec.num_heads + 2 * spec.num_kv_heads) * spec.head_dim
    layer = spec.hidden_size * (heads + spec.num_heads * spec.head_dim + 3 * spec.intermediate_size)
    stored = 2 if form == "bf16" else 0.5 + 4 / 128
    return int(len(spec.layers) * layer * stored) + 2 * 2 * spec.vocab_size * spec.hidden_size


def main() -> None:
    kernels.unavailable = lambda device: ""
    Recorder()
    found = {}
    for planned in sys.argv[1:]:
        name, form, card = planned.split()
        for roles in (("prefill",), ("decode",), ("prefill", "decode")):
            gpu, held, told = Gpu(int(int(card) * 1e9 * SHOWN)), [], []
            for role in roles:
                worker = Allocator(gpu)
                worker.stand_in()
                try:
                    parts, made = start(name, form, role, worker, len(roles))
                    held.append(parts)
                    told.append(made)
                except ValueError as error:
                    told.append(str(error))
                    gpu.workers.remove(worker)
            found[f"{name} {form} on {card} GB: {' + '.join(roles)}"] = told
    json.dump(found, sys.stdout)


if __name__ == "__main__":
    main()
