"""An engine with random weights in the shape of a known model: GPU checks need no download."""

import gc
from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor

from baton.engine.attention.base import AttentionShape
from baton.engine.attention.selection import choose as choose_attention
from baton.engine.core.config import EngineConfig, resolve
from baton.engine.core.model_spec import LayerSpec, ModelSpec, NormSpec, RopeSpec
from baton.engine.core.request import Key, Output, PrefillDone, Request, RequestEnded, TokenRun
from baton.engine.engine import Engine
from baton.engine.execute.launcher import GpuLauncher, Launcher
from baton.engine.kv.pool import KVPool
from baton.engine.layers.linear import choose as choose_linear
from baton.engine.layers.rope import Rope
from baton.engine.models.decoder import Model
from baton.engine.sampling.native_sampler import host_sampler
from baton.engine.sampling.on_device import sampler_on
from baton.engine.weights.formats.base import HEAD, WeightSource
from baton.engine.weights.forms import DenseWeight, Fp8Weight, IntWeight, Weight
from baton.sampling_params import SamplingParams
from kvtransfer.layout import KVLayout

BLOCK_SIZE = 64
# layers, hidden, intermediate, heads, kv heads, head_dim, vocabulary
LLAMA_8B = (32, 4096, 14336, 32, 8, 128, 128256)
QWEN_600M = (28, 1024, 3072, 16, 8, 128, 151936)
FORMS = ("bf16", "int4-g128", "fp8", "int8")


class RandomSource(WeightSource):
    """Random weights of one form, made on the device; the output head of a quantized model stays in bf16."""

    name = "random"

    def __init__(self, form: str, device: torch.device):
        super().__init__()
        self._form, self._device = form, device
        self._generator = torch.Generator(device).manual_seed(0)

    @property
    def file_bytes(self) -> int:
        return 0

    def tensor(self, name: str, *size: int) -> Tensor:
        if len(size) == 1:
            return torch.ones(size, dtype=torch.bfloat16, device=self._device)
        return self._normal(*size).bfloat16()

    def exact(self, name: str, *size: int) -> Tensor:
        return self.tensor(name, *size).float()

    def linear(self, module: str, out_features: int, in_features: int) -> Weight:
        size = (out_features, in_features)
        if self._form == "bf16" or module == HEAD:
            return DenseWeight(self._normal(*size).bfloat16())
        if self._form == "fp8":
            values = (self._normal(*size) * 1e4).clamp_(-448, 448).to(torch.float8_e4m3fn)
            return Fp8Weight(values, self._scales(out_features, 1) * 4e-4, (1, in_features), "dynamic")
        if self._form == "int8":
            return IntWeight(
                8,
                self._bytes(*size).view(torch.int8),
                self._scales(out_features, 1) * 4e-4,
                in_features,
                activations="dynamic",
            )
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
        folder=Path("random"),
        family="llama",
        vocab_size=vocab,
        hidden_size=hidden,
        intermediate_size=inner,
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        norm=NormSpec(1e-5),
        ropes=(RopeSpec(kind="default", theta=500000.0, max_position_embeddings=context, original_context=context),),
        layers=(LayerSpec(),) * num_layers,
        tied=False,
        dtype="bf16",
    )


class RandomEngine:
    """A whole engine on one device: scheduler, pool, launcher with its graphs, sampler."""

    def __init__(
        self,
        form: str,
        device: torch.device,
        sizes=LLAMA_8B,
        *,
        kv: str = "bf16",
        exact: bool = False,
        max_num_seqs: int = 256,
        context: int = 2048,
        chunk: int = 8192,
        num_tokens: int = 0,
        proposers=(),
        sm_share: float | None = None,
    ):
        """Build the engine. `num_tokens` is the pool's size, 0 for max_num_seqs contexts; `sm_share` is a share of the
        multiprocessors, None for all."""
        spec = make_spec(sizes, context)
        num_blocks = -(-(num_tokens or max_num_seqs * context) // BLOCK_SIZE)
        self.config = resolve(
            EngineConfig(
                model=spec.folder,
                kv_dtype=kv,
                block_size=BLOCK_SIZE,
                num_blocks=num_blocks,
                max_model_len=context,
                max_num_seqs=max_num_seqs,
                max_num_batched_tokens=max(chunk, max_num_seqs + 64),
                batch_invariant=exact,
                sm_share=sm_share,
            ),
            spec,
        )
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
        sampler = sampler_on(device) if on_gpu else host_sampler()
        self.model, self.device = model, device
        self.engine = Engine(self.config, model, pool, b"", sampler, proposers, self.launcher)
        self.token_bytes = pool.layout.block_bytes / BLOCK_SIZE
        self._count, self._generator = 0, torch.Generator().manual_seed(0)

    @property
    def weight_bytes(self) -> int:
        """Bytes that every step reads; of the embedding, a step reads single rows only."""
        return self.model.weights.num_bytes

    def ids(self, count: int) -> list[int]:
        return torch.randint(5, self.model.spec.vocab_size, (count,), generator=self._generator).tolist()

    def request(self, ids: Sequence[int], num_output: int, **sampling) -> Request:
        """Return a request without span hashes: the prefix cache is neither read nor filled."""
        self._count += 1
        return Request(Key(str(self._count)), tuple(ids), len(ids), SamplingParams(**sampling), num_output)

    def answers(self, prompts: Sequence[Sequence[int]], num_output: int, **sampling) -> list[list[int]]:
        """Return the token ids that follow each of the prompts, which run concurrently. Raises RuntimeError if one
        fails."""
        found: dict[Key, list[int]] = {}
        for ids in prompts:
            request = self.request(ids, num_output, **sampling)
            found[request.key] = []
            self.engine.submit(request)
        num_open = len(found)
        while num_open:
            for output in self.engine.step():
                num_open -= self._take(output, found)
        return list(found.values())

    @staticmethod
    def _take(output: Output, found: dict[Key, list[int]]) -> bool:
        """Store an output's tokens, and return whether its request has ended."""
        if isinstance(output, PrefillDone):
            found[output.key] += [first.token_id for first in output.first_tokens]
        elif isinstance(output, TokenRun):
            found[output.key] += output.token_ids
        elif isinstance(output, RequestEnded):
            if output.error:
                raise RuntimeError(f"{output.error}: {output.message}")
            return True
        return False

    def finish(self) -> None:
        """Cancel the requests that still run."""
        for key in list(self.engine.admission.groups):
            self.engine.cancel(key)
        while self.engine.has_work():
            if not any(isinstance(each, RequestEnded) for each in self.engine.step()) and not self.engine.has_computed:
                break

    def close(self) -> None:
        """Free the memory. The object cannot be used afterwards."""
        del self.engine, self.launcher, self.model
        gc.collect()
        if self.device.type == "cuda":
            torch.cuda.empty_cache()
