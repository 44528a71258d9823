"""Arms of bench/cpu.py: a whole engine of ours with random weights of one form. Times are in seconds."""

import statistics
import time
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from baton.engine.attention.base import AttentionShape
from baton.engine.attention.selection import choose as choose_attention
from baton.engine.core.config import EngineConfig, resolve
from baton.engine.core.model_spec import ExpertsSpec, LayerSpec, ModelSpec, NormSpec, RopeSpec
from baton.engine.core.request import RequestEnded, TokenRun
from baton.engine.engine import Engine
from baton.engine.kv.pool import KVPool
from baton.engine.layers.linear import choose as choose_linear
from baton.engine.layers.rope import Rope
from baton.engine.models.decoder import Model
from baton.engine.sampling.native_sampler import host_sampler
from baton.engine.weights.formats.base import WeightSource
from baton.engine.weights.forms import DenseWeight, IntWeight, Weight
from bench.arms.shape import ROPE_THETA, Shape
from kvtransfer.layout import KVLayout
from tests.support import bare_engine

MAX_LEN = 1024


@dataclass(frozen=True)
class Form:
    """A weight form of ours."""

    bits: int
    group: int = 0  # 0: one scale per row
    activations: str = "none"


FORMS = {
    "bf16": Form(16),
    "int8": Form(8, activations="dynamic"),
    "int8-g32": Form(8, 32),
    "int4-g32": Form(4, 32),
    "int4-g128": Form(4, 128),
}


EXPERT_NAMES = ("mlp.gate", *(f"mlp.experts.{{}}.{name}_proj" for name in ("gate", "up", "down")))


class RandomSource(WeightSource):
    """Random weights of one form. Modules of one shape share their values, since kernels pack copies."""

    name = "random"

    def __init__(self, form: Form):
        super().__init__()
        self._form, self._weights, self._stored = form, {}, 0
        self._generator = torch.Generator().manual_seed(0)

    @property
    def file_bytes(self) -> int:
        """The bytes of a file with the values and fp16 scales."""
        return self._stored

    def tensor(self, name: str, *size: int) -> Tensor:
        self._stored += 2 * torch.Size(size).numel()
        if len(size) == 1:
            return torch.ones(size, dtype=torch.bfloat16)
        return (torch.randn(size, generator=self._generator) * 0.02).bfloat16()

    def exact(self, name: str, *size: int) -> Tensor:
        return self.tensor(name, *size).float()

    def linear(self, module: str, out_features: int, in_features: int) -> Weight:
        size = (out_features, in_features)
        if size not in self._weights:
            self._weights[size] = self._make(*size)
        weight = self._weights[size]
        self._stored += weight.values.nbytes + (2 * weight.scales.numel() if isinstance(weight, IntWeight) else 0)
        return weight

    def _make(self, num_out: int, num_in: int) -> Weight:
        form = self._form
        if form.bits == 16:
            return DenseWeight((torch.randn(num_out, num_in, generator=self._generator) * 0.02).bfloat16())
        group = form.group or num_in
        scales = (torch.rand(num_out, num_in // group, generator=self._generator) * 0.04 / 2**form.bits).half().float()
        low, dtype = (-127, torch.int8) if form.bits == 8 else (0, torch.uint8)
        columns = num_in * form.bits // 8
        values = torch.randint(low, low + 255, (num_out, columns), dtype=dtype, generator=self._generator)
        return IntWeight(form.bits, values, scales, group, activations=form.activations)


def make_spec(shape: Shape, num_layers: int, vocab_size: int) -> ModelSpec:
    experts = None
    if shape.num_experts:
        experts = ExpertsSpec(
            num_experts=shape.num_experts,
            num_chosen=shape.num_chosen,
            intermediate_size=shape.ffn_size,
            names=EXPERT_NAMES,
        )
    return ModelSpec(
        folder=Path("random"), family="qwen3_moe" if experts else "llama", vocab_size=vocab_size,
        hidden_size=shape.hidden_size, intermediate_size=shape.ffn_size, num_heads=shape.num_heads,
        num_kv_heads=shape.num_kv_heads, head_dim=shape.head_dim, norm=NormSpec(1e-5),
        ropes=(RopeSpec(kind="default", theta=ROPE_THETA, max_position_embeddings=MAX_LEN, original_context=MAX_LEN),),
        layers=(LayerSpec(experts=experts),) * num_layers, qk_norm="head" if experts else "", tied=False, dtype="bf16",
    )  # fmt: skip


def linear_weights(spec: ModelSpec, head: bool) -> int:
    """Return the number of weights that a token is multiplied by, with the output head if `head`."""
    return spec.num_layer_weights(chosen_only=True) + head * spec.hidden_size * spec.vocab_size


def unread_bytes(model: Model) -> int:
    """Return the bytes of experts that one token does not use, minus those of routers, which the report leaves out."""
    num_bytes = 0
    for layer in model.layers:
        if (experts := layer.experts) is not None:
            one = experts.gate_up[0].num_bytes + experts.down[0].num_bytes
            num_bytes += (experts.spec.num_experts - experts.spec.num_chosen) * one - experts.router.num_bytes
    return num_bytes


class Arm:
    """A whole engine, and the times of its requests."""

    def __init__(self, engine: Engine):
        self._engine, self._count = engine, 0
        self._generator = torch.Generator().manual_seed(0)

    def prefill_s(self, num_prompt: int) -> float:
        """Return the seconds from submit to the first token."""
        request = self._request(num_prompt, 1)
        begun = time.perf_counter()
        bare_engine.serve_alone(self._engine, [request])
        return time.perf_counter() - begun

    def step_s(self, batch_size: int, num_prompt: int, num_steps: int) -> float:
        """Return the median seconds of a step in which every sequence decodes."""
        engine, open_requests, seconds = self._engine, batch_size, []
        for _ in range(batch_size):
            engine.submit(self._request(num_prompt, num_steps + batch_size * num_prompt // 64 + 8))
        while open_requests:
            begun = time.perf_counter()
            outputs = engine.step()
            runs = [each for each in outputs if isinstance(each, TokenRun)]
            if len(runs) == batch_size:
                # one call may run several steps, at whose end the first sequence may end
                num_done = len(runs[0].token_ids)
                seconds += [(time.perf_counter() - begun) / num_done] * num_done
            open_requests -= sum(isinstance(each, RequestEnded) for each in outputs)
        return statistics.median(seconds[2:num_steps])

    def _request(self, num_prompt: int, num_output: int):
        self._count += 1
        ids = torch.randint(5, self._engine.spec.vocab_size, (num_prompt,), generator=self._generator).tolist()
        return bare_engine.bare_request(str(self._count), ids, max_tokens=num_output)


class Ours(Arm):
    """A whole engine: scheduler, pool, sampler, and the model in one weight form."""

    def __init__(self, form: str, spec: ModelSpec, linear: str = "auto", batch_invariant: bool = True):
        config = EngineConfig(model=spec.folder, num_blocks=33 * MAX_LEN // 32, max_model_len=MAX_LEN, linear=linear)
        config = resolve(config, spec)
        make, _ = choose_linear(linear, batch_invariant, torch.bfloat16)
        heads = AttentionShape(spec.num_heads, spec.num_kv_heads, spec.head_dim, spec.windows, torch.bfloat16)
        attention, _ = choose_attention("auto", heads, batch_invariant)
        ropes = [Rope(rope, spec.head_dim, MAX_LEN) for rope in spec.ropes]
        make_router, _ = choose_linear("auto", batch_invariant, torch.float32)
        model = Model(spec, torch.bfloat16, RandomSource(FORMS[form]), make, attention, ropes, make_router)
        self.report, self.step_bytes = model.weights, model.weights.num_bytes - unread_bytes(model)
        self.resident_bytes = self.report.num_bytes + 2 * spec.vocab_size * spec.hidden_size  # and the embedding
        pool = KVPool(KVLayout((model.kv_group("bf16", config.block_size),)), config.num_blocks)
        super().__init__(Engine(config, model, pool, b"", host_sampler()))
