"""Run whole steps of large models on meta tensors: nothing is computed, but every operator checks its devices and
shapes, and every launch is bound to its kernel's signature, as for compute capability 9.0, and its grid checked. Prints
as JSON, by model: launches, the variants of the warm-up, and those that a serving trace asks for beyond them. Run with
TRITON_INTERPRET=0."""

import json
import random
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from triton.backends.compiler import GPUTarget
from triton.compiler import make_backend
from triton.runtime.jit import JITFunction, create_function_from_signature

from baton.engine import kernels
from baton.engine.adapters.adapters import Adapter
from baton.engine.adapters.gpu_low_rank import GpuLowRank
from baton.engine.attention import triton_paged
from baton.engine.attention.base import AttentionShape
from baton.engine.core.batch import AdapterRows, ForwardBatch, SeqSlice, StateRows
from baton.engine.core.model_spec import ExpertsSpec, LatentSpec, LayerSpec, ModelSpec, NormSpec, RopeSpec
from baton.engine.core.state_spec import DeltaNetSpec, Mamba2Spec, MambaSpec
from baton.engine.execute.inputs import StepInputs, StepShape
from baton.engine.execute.warm_up import warm_steps
from baton.engine.kv.pool import KVPool
from baton.engine.layers.linear.gpu import GpuChoice
from baton.engine.layers.rope import Rope
from baton.engine.models.decoder import Model
from baton.engine.sampling.on_device import sampler_on
from baton.engine.sampling.sampler import SampleRow
from baton.engine.weights.formats.base import HEAD, WeightSource
from baton.engine.weights.forms import DenseWeight, Fp8Weight, IntWeight, Weight
from baton.sampling_params import SamplingParams
from kvtransfer.layout import KVLayout

META, BLOCK_SIZE, NUM_TOKENS, NUM_SEQS, CONTEXT = torch.device("meta"), 32, 8192, 64, 8192
PARAMS = (
    SamplingParams(), SamplingParams(temperature=1.0), SamplingParams(temperature=1.0, top_p=0.9, repetition_penalty=1.1),
)  # fmt: skip
# layers (of many alike), hidden, intermediate, heads, kv heads, head_dim, vocabulary, q/k norm
SHAPES = {
    "8B": (2, 4096, 14336, 32, 8, 128, 128256, False),
    "70B": (2, 8192, 28672, 64, 8, 128, 128256, False),
    "Qwen3": (2, 1024, 3072, 16, 8, 128, 151936, True),
    "256": (1, 2048, 4096, 8, 4, 256, 32000, False),
    "256 capped": (1, 2048, 4096, 8, 4, 256, 32000, False),
    "128 experts": (1, 2048, 768, 32, 8, 128, 32000, False),
}
EXPERTS = ExpertsSpec(
    num_experts=128, num_chosen=8, intermediate_size=768, names=("router", "{}.gate", "{}.up", "{}.down")
)
FORMS = (("bf16", "bf16"), ("int4", "int8"), ("fp8", "fp8_e4m3"), ("int8", "int4"))  # of weights and KV
ACTIVATIONS = {"fp8": "dynamic", "fp8-block": "dynamic-block", "fp8-stored": "none"}


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

    def exact(self, name: str, *size: int) -> Tensor:
        return torch.empty(size, dtype=torch.float32, device=META)

    def linear(self, module: str, out_features: int, in_features: int) -> Weight:
        size = (out_features, in_features)
        if self._form == "bf16" or module == HEAD:
            return DenseWeight(self.tensor(module, *size))
        if self._form in ACTIVATIONS:
            block = (128, 128) if self._form == "fp8-block" else (1, in_features)
            scales = _empty(torch.float32, -(-out_features // block[0]), -(-in_features // block[1]))
            return Fp8Weight(_empty(torch.float8_e4m3fn, *size), scales, block, ACTIVATIONS[self._form])
        if self._form == "int8":
            scales = _empty(torch.float32, out_features, 1)
            return IntWeight(8, _empty(torch.int8, *size), scales, in_features, activations="dynamic")
        scales = _empty(torch.float32, out_features, in_features // 128)
        return IntWeight(4, _empty(torch.uint8, out_features, in_features // 2), scales, 128)


def _empty(dtype: torch.dtype, *size: int) -> Tensor:
    return torch.empty(size, dtype=dtype, device=META)


@dataclass(frozen=True)
class Variant:
    """A kernel and what it is compiled for, as Triton's compiler takes it."""

    kernel: JITFunction
    signature: dict[str, str]
    constants: dict[tuple[int, ...], Any]
    attributes: dict[tuple[int, ...], Any]
    options: dict[str, Any]

    @property
    def name(self) -> str:
        """Return its constants, the types of its pointers, the integers that 16 does not divide, and its options."""
        names = self.kernel.arg_names
        words = [f"{names[place[0]]}={value}" for place, value in self.constants.items()]
        for index, (name, kind) in enumerate(self.signature.items()):
            if kind.startswith("*") or (kind.startswith("i") and not self.attributes.get((index,))):
                words.append(f"{name}:{kind}")
        given = ("num_warps", "num_stages", "enable_fp_fusion")
        return " ".join([*words, *(f"{name}={self.options[name]}" for name in given)])


class Recorder:
    """Take the place of launches: what each would have been compiled for."""

    def __init__(self):
        self.variants: dict[str, Variant] = {}  # by all that a kernel is compiled for
        self.launches = 0
        self._backend = make_backend(GPUTarget("cuda", 90, 32))
        self._binders: dict[JITFunction, Callable] = {}
        JITFunction.run = lambda kernel, *given, **named: self._launch(kernel, *given, **named)

    def _launch(self, kernel: JITFunction, *given, grid, warmup, **named) -> None:
        if (bind := self._binders.get(kernel)) is None:
            bind = create_function_from_signature(kernel.signature, kernel.params, self._backend)
            self._binders[kernel] = bind
        bound, specialization, options = bind(*given, **named)
        for name, value in bound.items():
            if isinstance(value, Tensor):
                assert value.device == META, f"{kernel.__name__}: {name} is on {value.device}"
        size = (*grid, 1, 1)[:3]
        assert 0 < size[0] < 2**31 and 0 < size[1] < 65536 and 0 < size[2] < 65536, (kernel.__name__, size)
        # A meta tensor has no address: where it begins in its storage says how it is aligned.
        places = [v.storage_offset() * v.element_size() % 16 for v in bound.values() if isinstance(v, Tensor)]
        key = f"{kernel.__name__} {specialization} {sorted(options.items(), key=str)} {places}"
        if key not in self.variants:
            packed, *parts = kernel._pack_args(self._backend, named, bound, specialization, options)
            self.variants[key] = Variant(kernel, *parts, packed.__dict__)
        self.launches += 1


def make_model(
    name: str, form: str, kv_form: str, exact: bool, context: int = CONTEXT, num_layers: int | None = None
) -> Model:
    spec = make_spec(name, context)
    spec = spec if num_layers is None else replace(spec, layers=(LayerSpec(),) * num_layers)
    heads, kv_heads, head_dim = spec.num_heads, spec.num_kv_heads, spec.head_dim
    backend = triton_paged.TritonAttention if exact else triton_paged.FastTritonAttention
    softcap = 50.0 if name.endswith("capped") else None
    attention = backend(
        AttentionShape(
            heads, kv_heads, head_dim, spec.windows, torch.bfloat16, META, kv_form, BLOCK_SIZE, softcap=softcap
        )
    )
    make, make_router = (GpuChoice("auto", exact, dtype, META) for dtype in (torch.bfloat16, torch.float32))
    ropes = [rope_of(context, head_dim).to(META)]
    return Model(spec, torch.bfloat16, MetaSource(form), make, attention, ropes, make_router)


@cache
def rope_of(context: int, head_dim: int) -> Rope:
    return Rope(
        RopeSpec(kind="default", theta=5e5, max_position_embeddings=context, original_context=context),
        head_dim,
        context,
    )


def make_spec(name: str, context: int) -> ModelSpec:
    layers, hidden, inner, heads, kv_heads, head_dim, vocab, qk_norm = SHAPES[name]
    layer = LayerSpec(experts=EXPERTS if name.endswith("experts") else None)
    spec = ModelSpec(
        folder=Path(name), family="qwen3" if qk_norm else "llama", vocab_size=vocab, hidden_size=hidden,
        intermediate_size=inner, num_heads=heads, num_kv_heads=kv_heads, head_dim=head_dim, norm=NormSpec(1e-5),
        ropes=(RopeSpec(kind="default", theta=5e5, max_position_embeddings=context, original_context=context),),
        layers=(layer,) * layers, tied=False, dtype="bf16",
    )  # fmt: skip
    return replace(spec, qk_norm="head") if qk_norm else spec


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
    """Return steps as serving has them: decode of some sequences, chunks of any length alone, both together, and
    proposals that are verified; a chunk of each size that tiles are chosen by."""
    draw, steps = random.Random(seed), []
    for _ in range(16):
        decode = [(1, draw.randrange(2, CONTEXT)) for _ in range(draw.randrange(0, NUM_SEQS))]
        size = draw.choice((0, 1, 7, 33, draw.randrange(1, NUM_TOKENS - NUM_SEQS), NUM_TOKENS - NUM_SEQS))
        chunk = [(size, size + draw.randrange(0, CONTEXT - size))] if size else []
        if decode or chunk:
            steps.append(step_of([*decode, *chunk]))
    verified = [[(width, draw.randrange(width, CONTEXT))] * count for width in (2, 5) for count in (1, 16)]
    chunks = [[(size, size)] for size in (100, 200, 400, 700, 1300, 2500, 5000)]
    return [*steps, *map(step_of, [*verified, *chunks])]


@dataclass(frozen=True)
class Setup:
    """A model in one form of weights and KV, and what it runs steps with."""

    model: Model
    pool: KVPool
    inputs: StepInputs

    def run(self, recorder: Recorder, steps: list[ForwardBatch]) -> dict[str, Variant]:
        recorder.variants = {}
        for step in steps:
            logits = self.model.forward(self.inputs.send(step), self.pool)
            rows = [SampleRow(PARAMS[index % len(PARAMS)], 0, index, (1, 2), (3,)) for index in range(len(logits))]
            sampler_on(META).draw(logits, rows)
        return recorder.variants

    def warm_up(self, recorder: Recorder) -> dict[str, Variant]:
        sizes = NUM_TOKENS, NUM_SEQS, self.pool.num_blocks, BLOCK_SIZE
        return self.run(recorder, warm_steps(*sizes, self.pool.states is not None))


def torch_layers(recorder: Recorder) -> dict[str, dict]:
    """Steps of what torch runs between Triton's products and attention: latent rows (of DeepSeek V3's sizes, 16 heads),
    attention sinks, and adapters of two ranks."""
    rope, found = RopeSpec(kind="default", theta=1e4, max_position_embeddings=CONTEXT, original_context=CONTEXT), {}
    latent = dict(
        latent=LatentSpec(rank=512, rope_dim=64, nope_dim=128, value_dim=128, query_rank=1536), num_heads=16, num_kv_heads=1,
        head_dim=576, attention_scale=0.07, ropes=(replace(rope, rotary_dim=64),),
    )  # fmt: skip
    sinks = dict(
        sinks=True, num_heads=64, num_kv_heads=8, head_dim=64, activation="clamped_swiglu", swiglu_alpha=1.7,
        swiglu_limit=7.0, qkv_bias=True, output_bias=True, ropes=(rope,),
    )  # fmt: skip
    for name, given in (("latent", latent), ("sinks", sinks), ("adapters", {"ropes": (rope,)})):
        spec = replace(make_spec("256", CONTEXT), **given)
        for exact in (True, False):
            backend = triton_paged.TritonAttention if exact else triton_paged.FastTritonAttention
            shape = AttentionShape(
                spec.num_heads, spec.num_kv_heads, spec.head_dim, spec.windows, torch.bfloat16, META, "bf16",
                BLOCK_SIZE, given_scale=spec.attention_scale, sinks=spec.sinks,
            )  # fmt: skip
            make = GpuChoice("auto", exact, torch.bfloat16, META)
            ropes = [Rope(spec.ropes[0], spec.head_dim, CONTEXT).to(META)]
            adapted = name == "adapters"
            model = Model(spec, torch.bfloat16, MetaSource("bf16"), make, backend(shape), ropes, adapted=adapted)
            pool = KVPool(KVLayout((model.kv_group("bf16", BLOCK_SIZE),)), CONTEXT // BLOCK_SIZE, device=META)
            inputs = StepInputs(META, StepShape(NUM_TOKENS, NUM_TOKENS, NUM_SEQS, CONTEXT // BLOCK_SIZE + 1))
            setup = Setup(model, pool, inputs)
            warmed, steps = setup.warm_up(recorder).keys(), trace(exact)
            if adapted:
                adapters = [make_adapter(spec, rank) for rank in (16, 96)]
                recorder.variants = {}
                for adapter in adapters:
                    model._gpu_adapters.warm_up(adapter, torch.bfloat16)
                warmed |= recorder.variants.keys()
                steps = [with_adapters(step, adapters) for step in steps]
            cold = sorted(setup.run(recorder, steps).keys() - warmed)
            found[f"{name} {exact}"] = {"layers": model.layers_name, "warm": len(warmed), "cold": cold}
    return found


# Of Granite 4's, Qwen3-Next's and Jamba's sizes.
STATES = {
    "Mamba-2": Mamba2Spec(num_heads=128, head_dim=64, num_groups=1, state_size=128, taps=4),
    "gated delta net": DeltaNetSpec(num_heads=32, num_key_heads=16, key_dim=128, value_dim=128, taps=4),
    "Mamba": MambaSpec(num_channels=8192, state_size=16, step_rank=256, taps=4),
}


def state_layers(recorder: Recorder) -> dict[str, dict]:
    """Steps of models of a layer with a state and one of attention, and what the first one launches for a decode step
    of 64 sequences; with room for proposals, and in the fast form without."""
    rope, found = RopeSpec(kind="default", theta=1e4, max_position_embeddings=CONTEXT, original_context=CONTEXT), {}
    for name, state in STATES.items():
        layers = (LayerSpec(has_attention=False, state=state), LayerSpec())
        base = make_spec("256", CONTEXT)
        spec = replace(base, layers=layers, ropes=(rope,), names=replace(base.names, state="mixer"))
        for exact, proposes in ((True, True), (False, False)):
            backend = triton_paged.TritonAttention if exact else triton_paged.FastTritonAttention
            shape = AttentionShape(
                spec.num_heads, spec.num_kv_heads, spec.head_dim, spec.windows, torch.bfloat16, META, "bf16", BLOCK_SIZE
            )
            make = GpuChoice("auto", exact, torch.bfloat16, META)
            ropes = [rope_of(CONTEXT, spec.head_dim).to(META)]
            model = Model(spec, torch.bfloat16, MetaSource("bf16"), make, backend(shape), ropes)
            pool = KVPool(model.kv_layout("bf16", BLOCK_SIZE), CONTEXT // BLOCK_SIZE, device=META, num_states=8)
            if proposes:
                pool.states.hold_drafts(model.num_draft_elements)
            table = CONTEXT // BLOCK_SIZE + 1
            inputs = StepInputs(META, StepShape(NUM_TOKENS, NUM_TOKENS, NUM_SEQS, table, True))
            setup = Setup(model, pool, inputs)
            warmed = setup.warm_up(recorder).keys()
            cold = sorted(setup.run(recorder, [with_states(step) for step in trace(exact)[::2]]).keys() - warmed)
            sent, mixer = inputs.send(with_states(step_of([(1, 1024)] * 64))), model.layers[0].state
            plan = mixer.plan(sent, pool.states)
            recorder.launches = 0
            mixer(_empty(torch.bfloat16, 64, spec.hidden_size), plan, 0)
            found[f"{name} {exact} {proposes}"] = {
                "layers": model.layers_name, "warm": len(warmed), "cold": cold, "launches": recorder.launches,
                "capturable": model.capturable, "folded_by": mixer.name,
            }  # fmt: skip
    return found


def with_states(step: ForwardBatch) -> ForwardBatch:
    return replace(step, seqs=[replace(seq, state=StateRows(0)) for seq in step.seqs])


def make_adapter(spec: ModelSpec, rank: int) -> Adapter:
    """Return one of attention's first linear and of the MLP's last."""
    inner, hidden = spec.intermediate_size, spec.hidden_size
    sizes = {"qkv": (hidden, (spec.num_heads + 2 * spec.num_kv_heads) * spec.head_dim), "down": (inner, hidden)}
    pairs = {
        name: GpuLowRank(_empty(torch.bfloat16, rank, size), [_empty(torch.bfloat16, out, rank)])
        for name, (size, out) in sizes.items()
    }
    return Adapter(str(rank), None, (pairs,) * spec.num_layers)


def with_adapters(step: ForwardBatch, adapters: list[Adapter]) -> ForwardBatch:
    """Return the step with adapters on two of three sequences."""
    rows = [
        AdapterRows(seq.query_start, seq.query_start + seq.query_len, adapters[index % 3])
        for index, seq in enumerate(step.seqs)
        if index % 3 < 2
    ]
    return replace(step, adapters=tuple(rows))


def launches_of_rounding(recorder: Recorder) -> dict[str, int]:
    """Return the launches of a step of 2,048 tokens, two layers, by the form of weights: none of its sums is in
    segments."""
    found = {}
    for form in ("bf16", "fp8", "fp8-block", "int8"):
        model = make_model("8B", form, "bf16", True)
        pool = KVPool(KVLayout((model.kv_group("bf16", BLOCK_SIZE),)), CONTEXT // BLOCK_SIZE, device=META)
        inputs = StepInputs(META, StepShape(NUM_TOKENS, NUM_TOKENS, 256, CONTEXT // BLOCK_SIZE + 1))
        recorder.launches = 0
        model.forward(inputs.send(step_of([(8, 8)] * 256)), pool)
        found[form] = recorder.launches
    return found


def launches_of_steps(recorder: Recorder) -> dict[str, int]:
    """Return the launches of steps of Llama-3.1-8B in bf16, exact, without the draw; and those of a draw."""
    model = make_model("8B", "bf16", "bf16", True, num_layers=32)
    pool = KVPool(KVLayout((model.kv_group("bf16", BLOCK_SIZE),)), CONTEXT // BLOCK_SIZE, device=META)
    inputs = StepInputs(META, StepShape(NUM_TOKENS, NUM_TOKENS, NUM_SEQS, CONTEXT // BLOCK_SIZE + 1))
    model.attention._wanted = 264  # of an H100
    found = {}
    for name, lens in (("decode 1", [(1, 1024)]), ("decode 64", [(1, 1024)] * 64), ("chunk 512", [(512, 512)])):
        recorder.launches = 0
        logits = model.forward(inputs.send(step_of(lens)), pool)
        found[name] = recorder.launches
        recorder.launches = 0
        sampler_on(META).draw(logits, [SampleRow(PARAMS[-1], 0, 1, (1, 2), (3,))] * len(logits))
        found["draw"] = recorder.launches
    return found


def forms_of(name: str) -> list[tuple[str, str]]:
    """Blocks of e4m3, and e4m3 whose activations stay as they are, are of one model each."""
    if name.endswith("capped"):
        return [FORMS[0], FORMS[3]]
    more = {"8B": ("fp8-block", "bf16"), "256": ("fp8-stored", "bf16")}.get(name)
    return [*FORMS, *([more] if more else [])]


def setups() -> Iterator[tuple[str, Setup]]:
    for name in SHAPES:
        for form, kv_form in forms_of(name):
            for exact in (True, False):
                model = make_model(name, form, kv_form, exact)
                pool = KVPool(KVLayout((model.kv_group(kv_form, BLOCK_SIZE),)), CONTEXT // BLOCK_SIZE, device=META)
                inputs = StepInputs(META, StepShape(NUM_TOKENS, NUM_TOKENS, NUM_SEQS, CONTEXT // BLOCK_SIZE + 1))
                yield f"{name} {form} {kv_form} {'exact' if exact else 'fast'}", Setup(model, pool, inputs)


def warm_variants() -> dict[str, Variant]:
    """Return every variant that the warm-up compiles for these models: by kernel's module, its name and the
    variant's."""
    kernels.unavailable = lambda device: ""
    recorder, found = Recorder(), {}
    with torch.inference_mode():
        for _, setup in setups():
            found |= {row_name(variant): variant for variant in setup.warm_up(recorder).values()}
    return found


def row_name(variant: Variant) -> str:
    module = variant.kernel.__module__.rpartition(".")[2]
    return f"{module}.{variant.kernel.__name__} {variant.name}"


def main() -> None:
    kernels.unavailable = lambda device: ""
    recorder, found = Recorder(), {}
    with torch.inference_mode():
        for name, setup in setups():
            warmed = setup.warm_up(recorder)
            recorder.launches = 0
            served = setup.run(recorder, trace(len(found)))
            assert setup.model.layers_name == "triton", setup.model.reasons
            found[name] = {
                "launches": recorder.launches, "warm": sorted(map(row_name, warmed.values())),
                "cold": sorted(served.keys() - warmed.keys()),
            }  # fmt: skip
        steps, rounding = launches_of_steps(recorder), launches_of_rounding(recorder)
        others, states = torch_layers(recorder), state_layers(recorder)
    made = {"models": found, "steps": steps, "rounding": rounding, "torch": others, "states": states}
    json.dump(made, sys.stdout)


if __name__ == "__main__":
    main()
