"""Arms of bench/gpu.py: an engine of ours with random weights of the Llama-3.1-8B shape. Answers in seconds."""

import gc
import math
import statistics
import time
from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor

from baton.engine.attention.base import AttentionShape
from baton.engine.attention.selection import choose as choose_attention
from baton.engine.core.config import EngineConfig, resolve
from baton.engine.core.model_spec import LayerSpec, ModelSpec, NormSpec, RopeSpec
from baton.engine.core.request import PrefillDone, RequestEnded, TokenRun
from baton.engine.engine import Engine
from baton.engine.execute.launcher import GpuLauncher, Launcher
from baton.engine.kv.pool import KVPool
from baton.engine.layers.linear import choose as choose_linear
from baton.engine.layers.rope import Rope
from baton.engine.models.decoder import Model
from baton.engine.sampling.on_device import DeviceSampler
from baton.engine.sampling.sampler import Sampler
from baton.engine.weights.formats.base import HEAD, WeightSource
from baton.engine.weights.forms import DenseWeight, Fp8Weight, IntWeight, Weight
from kvtransfer.layout import KVLayout
from kvtransfer.naming import SpanHash, chain_hashes
from tests.support import bare

ROOT = SpanHash(b"root" * 8)
BLOCK_SIZE = 64
# layers, hidden, intermediate, heads, kv heads, head_dim, vocabulary
LLAMA_8B = (32, 4096, 14336, 32, 8, 128, 128256)
QWEN_600M = (28, 1024, 3072, 16, 8, 128, 151936)
FORMS = ("bf16", "int4-g128", "fp8", "int8")


class RandomSource(WeightSource):
    """Random weights of one form, made on their device; the head of a quantized model stays in bf16."""

    name = "random"
    file_bytes = 0

    def __init__(self, form: str, device: torch.device):
        super().__init__()
        self._form, self._device = form, device
        self._generator = torch.Generator(device).manual_seed(0)

    def tensor(self, name: str, *size: int) -> Tensor:
        if len(size) == 1:
            return torch.ones(size, dtype=torch.bfloat16, device=self._device)
        return self._normal(*size).bfloat16()

    def linear(self, module: str, out_features: int, in_features: int) -> Weight:
        size = (out_features, in_features)
        if self._form == "bf16" or module == HEAD:
            return DenseWeight(self._normal(*size).bfloat16())
        if self._form == "fp8":
            values = (self._normal(*size) * 1e4).clamp_(-448, 448).to(torch.float8_e4m3fn)
            return Fp8Weight(values, self._scales(out_features, 1) * 4e-4, (1, in_features), "dynamic")
        if self._form == "int8":
            return IntWeight(8, self._bytes(*size).view(torch.int8), self._scales(out_features, 1) * 4e-4, in_features,
                             activations="dynamic")  # fmt: skip
        scales = self._scales(out_features, in_features // 128) * 4e-3
        return IntWeight(4, self._bytes(out_features, in_features // 2), scales, 128)

    def _normal(self, *size: int) -> Tensor:
        return torch.empty(size, device=self._device).normal_(0, 0.02, generator=self._generator)

    def _scales(self, *size: int) -> Tensor:
        return torch.rand(size, device=self._device, generator=self._generator) + 0.5

    def _bytes(self, *size: int) -> Tensor:
        return torch.randint(1, 255, size, dtype=torch.uint8, device=self._device, generator=self._generator)


def make_spec(sizes: tuple[int, ...], context: int) -> ModelSpec:
    num_layers, hidden, inner, num_heads, num_kv_heads, head_dim, vocab = sizes
    return ModelSpec(
        folder=Path("random"), family="llama", vocab_size=vocab, hidden_size=hidden, intermediate_size=inner,
        num_heads=num_heads, num_kv_heads=num_kv_heads, head_dim=head_dim, norm=NormSpec(1e-5),
        ropes=(RopeSpec("default", 500000.0, context, context),), layers=(LayerSpec(),) * num_layers, tied=False,
        dtype="bf16",
    )  # fmt: skip


class Ours:
    """A whole engine on a device: scheduler, pool, launcher with its graphs, sampler."""

    def __init__(
        self, form: str, device: torch.device, sizes=LLAMA_8B, *, kv: str = "bf16", exact: bool = False,
        max_num_seqs: int = 256, context: int = 2048, chunk: int = 8192, num_tokens: int = 0, proposers=(),
        sm_share: float | None = None,
    ):  # fmt: skip
        """`num_tokens`: of the pool; 0: max_num_seqs contexts. `sm_share`: of the multiprocessors; None: all."""
        spec = make_spec(sizes, context)
        num_blocks = -(-(num_tokens or max_num_seqs * context) // BLOCK_SIZE)
        self.config = resolve(
            EngineConfig(
                model=spec.folder, kv_dtype=kv, block_size=BLOCK_SIZE, num_blocks=num_blocks, max_model_len=context,
                max_num_seqs=max_num_seqs, max_num_batched_tokens=max(chunk, max_num_seqs + 64), batch_invariant=exact,
                sm_share=sm_share,
            ), spec,
        )  # fmt: skip
        make, _ = choose_linear("auto", exact, torch.bfloat16, device)
        shape = AttentionShape(
            spec.num_heads, spec.num_kv_heads, spec.head_dim, spec.windows, torch.bfloat16, device, kv, BLOCK_SIZE
        )
        attention, _ = choose_attention("auto", shape, exact)
        ropes = [Rope(rope, spec.head_dim, context).to(device) for rope in spec.ropes]
        with torch.inference_mode():
            model = Model(spec, torch.bfloat16, RandomSource(form, device), make, attention, ropes)
            pool = KVPool(KVLayout((model.kv_group(kv, BLOCK_SIZE),)), num_blocks, device=device)
            on_gpu = device.type == "cuda"
            self.launcher = GpuLauncher(model, pool, self.config, bool(proposers)) if on_gpu else Launcher(model, pool)
        sampler = DeviceSampler() if on_gpu else Sampler()
        self.model, self.device = model, device
        self.engine = Engine(self.config, model, pool, b"", sampler, proposers, self.launcher)
        self.token_bytes = pool.layout.block_bytes / BLOCK_SIZE
        self._count, self._generator = 0, torch.Generator().manual_seed(0)

    @property
    def weight_bytes(self) -> int:
        """Read in every step; of the embedding only rows are."""
        return self.model.weights.num_bytes

    def ids(self, count: int) -> list[int]:
        return torch.randint(5, self.model.spec.vocab_size, (count,), generator=self._generator).tolist()

    def prefill_s(self, num_prompt: int, ids: list[int] | None = None) -> float:
        """From submit to the first token."""
        self.engine.submit(self.request(ids or self.ids(num_prompt), 1))
        begun = time.perf_counter()
        while not any(isinstance(each, PrefillDone) for each in self.engine.step()):
            pass
        seconds = time.perf_counter() - begun
        self.finish()
        return seconds

    def steps_s(self, batch_size: int, num_prompt: int, num_steps: int, least_steps: int = 3) -> list[float]:
        """Return the seconds of each step in which every sequence decodes, around the given context, without the first
        ones."""
        num_output = num_steps + least_steps + self.num_prefill_steps(batch_size, num_prompt) + 2
        for _ in range(batch_size):
            self.engine.submit(self.request(self.ids(num_prompt), num_output))
        seconds: list[float] = []
        while len(seconds) < num_steps + least_steps:
            begun = time.perf_counter()
            outputs = self.engine.step()
            if sum(isinstance(each, TokenRun) for each in outputs) == batch_size:
                seconds.append(time.perf_counter() - begun)
        self.finish()
        return seconds[least_steps:]

    def step_s(self, batch_size: int, num_prompt: int, num_steps: int) -> float:
        return statistics.median(self.steps_s(batch_size, num_prompt, num_steps))

    def replay_s(self, batch_size: int, num_runs: int) -> float:
        """The bare graph of a decode step, on the inputs that it had last."""
        times = []
        for _ in range(num_runs):
            begun = time.perf_counter()
            self.launcher.replay(batch_size)
            times.append(time.perf_counter() - begun)
        return statistics.median(times)

    def tokens(self, prompts: list[list[int]], num_output: int) -> list[list[int]]:
        """Greedy answers to prompts that run together."""
        requests = [self.request(ids, num_output) for ids in prompts]
        answers = bare.run(self.engine, requests)
        return [answers[request.key.request_id][0].token_ids for request in requests]

    def hit_s(self, num_prompt: int) -> tuple[float, float]:
        """To the first token of a prompt, cold, and again when all of it is cached."""
        ids = self.ids(num_prompt)
        hashes = tuple(chain_hashes(ROOT, ids))
        found = []
        for _ in range(2):
            request = replace(self.request(ids, 1), span_hashes=hashes, chain_parent=hashes[-1])
            begun = time.perf_counter()
            bare.run(self.engine, [request])
            found.append(time.perf_counter() - begun)
        return found[0], found[1]

    def num_prefill_steps(self, batch_size: int, num_prompt: int) -> int:
        room = self.config.max_num_batched_tokens - batch_size
        return math.ceil(batch_size * num_prompt / max(room // 64 * 64, 64)) + batch_size

    def request(self, ids: list[int], num_output: int):
        self._count += 1
        return bare.make_request(str(self._count), ids, max_tokens=num_output)

    def finish(self) -> None:
        """Ends what still runs."""
        for key in list(self.engine.admission.groups):
            self.engine.cancel(key)
        while self.engine.has_work():
            if not any(isinstance(each, RequestEnded) for each in self.engine.step()) and not self.engine.launched:
                break

    def close(self) -> None:
        """Gives the memory back."""
        self.engine = self.launcher = self.model = None
        gc.collect()
        if self.device.type == "cuda":
            torch.cuda.empty_cache()


def prefill_flops(num_tokens: int, sizes: tuple[int, ...] = LLAMA_8B) -> float:
    """Return the FLOPs of one prompt: projections of every token, the head of the last one, the causal half of
    attention."""
    num_layers, hidden, inner, num_heads, num_kv_heads, head_dim, vocab = sizes
    layer = hidden * (2 * num_heads + 2 * num_kv_heads) * head_dim + 3 * hidden * inner
    attention = 4 * num_layers * num_heads * head_dim * num_tokens**2 / 2
    return 2 * num_layers * layer * num_tokens + 2 * vocab * hidden + attention
