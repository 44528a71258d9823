"""Run whole steps of large models on meta tensors: nothing is computed, but every operator checks its devices and shapes,
and every launch is bound to its kernel's signature, as for compute capability 9.0, and its grid checked. Prints as JSON,
by model: launches, and the variants that a serving trace asks for beyond those of the warm-up. Run with
TRITON_INTERPRET=0."""

import json
import random
import sys
from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor
from triton.backends.compiler import GPUTarget
from triton.compiler import make_backend
from triton.runtime.jit import JITFunction, create_function_from_signature

from baton.engine import kernels
from baton.engine.attention import triton_paged
from baton.engine.attention.base import AttentionShape
from baton.engine.core.batch import ForwardBatch, SeqSlice
from baton.engine.core.model_spec import LayerSpec, ModelSpec, NormSpec, RopeSpec
from baton.engine.execute.inputs import StepInputs, StepShape
from baton.engine.execute.warm_up import warm_steps
from baton.engine.kernels import kv_write, linear, paged_attention, rows
from baton.engine.kv.pool import KVPool
from baton.engine.layers.linear.gpu import GpuChoice
from baton.engine.layers.rope import Rope
from baton.engine.models.decoder import Model
from baton.engine.weights.formats.base import HEAD, WeightSource
from baton.engine.weights.forms import DenseWeight, Fp8Weight, IntWeight, Weight
from kvtransfer.layout import KVLayout

META, BLOCK_SIZE, NUM_TOKENS, NUM_SEQS, CONTEXT = torch.device("meta"), 32, 2048, 64, 8192
KERNELS = (
    paged_attention.attend, paged_attention.combine, linear.multiply, linear.add_segments, linear.multiply_row,
    linear.quantize_rows, kv_write._write, rows._add_norm, rows._swiglu,
)  # fmt: skip
# layers (of many alike), hidden, intermediate, heads, kv heads, head_dim, vocabulary, q/k norm
SHAPES = {
    "8B": (2, 4096, 14336, 32, 8, 128, 128256, False),
    "70B": (2, 8192, 28672, 64, 8, 128, 128256, False),
    "Qwen3": (2, 1024, 3072, 16, 8, 128, 151936, True),
}


class MetaSource(WeightSource):
    """Weights of one form, without values."""

    name = "meta"

    def __init__(self, form: str):
        super().__init__()
        self._form = form

    @property
    def file_bytes(self) -> int:
        return 0

    def tensor(self, name: str, *size: int) -> Tensor:
        return torch.empty(size, dtype=torch.bfloat16, device=META)

    def linear(self, module: str, out_features: int, in_features: int) -> Weight:
        size = (out_features, in_features)
        if self._form == "bf16" or module == HEAD:
            return DenseWeight(self.tensor(module, *size))
        if self._form == "fp8":
            return Fp8Weight(
                _empty(torch.float8_e4m3fn, *size), _empty(torch.float32, out_features, 1), (1, in_features)
            )
        if self._form == "int8":
            scales = _empty(torch.float32, out_features, 1)
            return IntWeight(8, _empty(torch.int8, *size), scales, in_features, activations="dynamic")
        scales = _empty(torch.float32, out_features, in_features // 128)
        return IntWeight(4, _empty(torch.uint8, out_features, in_features // 2), scales, 128)


def _empty(dtype: torch.dtype, *size: int) -> Tensor:
    return torch.empty(size, dtype=dtype, device=META)


class Recorder:
    """Take the place of launches: what each would have been compiled for."""

    def __init__(self):
        self.variants: set[str] = set()
        self.launches = 0
        backend = make_backend(GPUTarget("cuda", 90, 32))
        for kernel in KERNELS:
            bind = create_function_from_signature(kernel.signature, kernel.params, backend)
            kernel.run = lambda *given, kernel=kernel, bind=bind, **named: self._launch(kernel, bind, *given, **named)

    def _launch(self, kernel: JITFunction, bind, *given, grid, warmup, **named) -> None:
        bound, specialization, options = bind(*given, **named)
        for name, value in bound.items():
            if isinstance(value, Tensor):
                assert value.device == META, f"{kernel.__name__}: {name} is on {value.device}"
        size = (*grid, 1, 1)[:3]
        assert 0 < size[0] < 2**31 and 0 < size[1] < 65536 and 0 < size[2] < 65536, (kernel.__name__, size)
        # A meta tensor has no address: where it begins in its storage says how it is aligned.
        places = [v.storage_offset() * v.element_size() % 16 for v in bound.values() if isinstance(v, Tensor)]
        self.variants.add(f"{kernel.__name__} {specialization} {sorted(options.items(), key=str)} {places}")
        self.launches += 1


def make_model(name: str, form: str, kv_form: str, exact: bool) -> Model:
    layers, hidden, inner, heads, kv_heads, head_dim, vocab, qk_norm = SHAPES[name]
    spec = ModelSpec(
        folder=Path(name), family="qwen3" if qk_norm else "llama", vocab_size=vocab, hidden_size=hidden,
        intermediate_size=inner, num_heads=heads, num_kv_heads=kv_heads, head_dim=head_dim, norm=NormSpec(1e-5),
        ropes=(RopeSpec("default", 5e5, CONTEXT, CONTEXT),), layers=(LayerSpec(),) * layers, tied=False, dtype="bf16",
    )  # fmt: skip
    if qk_norm:
        spec = replace(spec, qk_norm="head")
    backend = triton_paged.TritonAttention if exact else triton_paged.FastTritonAttention
    attention = backend(
        AttentionShape(heads, kv_heads, head_dim, spec.windows, torch.bfloat16, META, kv_form, BLOCK_SIZE)
    )
    make = GpuChoice("auto", exact, torch.bfloat16, META)
    return Model(
        spec, torch.bfloat16, MetaSource(form), make, attention, [Rope(spec.ropes[0], head_dim, CONTEXT).to(META)]
    )


def step_of(chunks: list[tuple[int, int]]) -> ForwardBatch:
    """Return a step of sequences, (tokens, positions) each, on the host."""
    seqs, row = [], 0
    for query_len, kv_len in chunks:
        seqs.append(SeqSlice(row, query_len, kv_len, torch.arange(-(-kv_len // BLOCK_SIZE))))
        row += query_len
    ends = torch.tensor([seq.query_start + seq.query_len - 1 for seq in seqs])
    rows = torch.arange(row)
    return ForwardBatch(rows, rows % CONTEXT, rows, seqs, ends)


def trace(seed: int) -> list[ForwardBatch]:
    """Return steps as serving has them: decode of some sequences, chunks of any length alone, and both together."""
    draw, steps = random.Random(seed), []
    for _ in range(16):
        decode = [(1, draw.randrange(2, CONTEXT)) for _ in range(draw.randrange(0, NUM_SEQS))]
        size = draw.choice((0, 1, 7, 33, draw.randrange(1, NUM_TOKENS - NUM_SEQS), NUM_TOKENS - NUM_SEQS))
        chunk = [(size, size + draw.randrange(0, CONTEXT - size))] if size else []
        if decode or chunk:
            steps.append(step_of([*decode, *chunk]))
    return steps


def main() -> None:
    kernels.unavailable = lambda device: ""
    recorder, found = Recorder(), {}
    with torch.inference_mode():
        for name in SHAPES:
            for form, kv_form in (("bf16", "bf16"), ("int4", "int8"), ("fp8", "fp8_e4m3"), ("int8", "int4")):
                for exact in (True, False):
                    model = make_model(name, form, kv_form, exact)
                    pool = KVPool(KVLayout((model.kv_group(kv_form, BLOCK_SIZE),)), CONTEXT // BLOCK_SIZE, device=META)
                    inputs = StepInputs(META, StepShape(NUM_TOKENS, NUM_TOKENS, NUM_SEQS, CONTEXT // BLOCK_SIZE + 1))

                    def run(steps, model=model, pool=pool, inputs=inputs) -> set[str]:
                        recorder.variants = set()
                        for step in steps:
                            model.forward(inputs.send(step), pool)
                        return recorder.variants

                    warmed = run(warm_steps(NUM_TOKENS, NUM_SEQS, pool.num_blocks, BLOCK_SIZE))
                    recorder.launches = 0
                    served = run(trace(len(found)))
                    assert model.layers_name == "triton", model.reasons
                    found[f"{name} {form} {kv_form} {'exact' if exact else 'fast'}"] = {
                        "launches": recorder.launches, "variants": len(served), "cold": sorted(served - warmed),
                    }  # fmt: skip
    json.dump(found, sys.stdout)


if __name__ == "__main__":
    main()
