"""The memory of a worker: weights, KV and the buffers of a step, exact to the byte where the engine accounts for it."""

from collections import Counter
from dataclasses import dataclass

from baton.engine.core.config import EngineConfig, default_num_blocks
from baton.engine.core.device import CONTEXT_BYTES, PROCESS_BYTES, UTILIZATION, Memory, pool_blocks
from baton.engine.core.model_errors import ModelError
from baton.engine.core.model_spec import ModelSpec
from baton.engine.parallel.shard import Shard, unfit_for_ranks
from baton.planning.devices import Device
from baton.planning.stored_form import HeldWeights, StoredForm, norm_bytes

# str: none (bf16), fp32, or the form to which an unquantized model is rounded at loading: int8, int4-gN, fp8
Form = str | StoredForm
_FLOATS = ("none", "fp32")
_SCALE_BYTES = 4  # per row, or per group of inputs
_PANEL = 64  # outputs that the CPU's kernels pack together
_ROUTER_BYTES = 4  # per weight of a router, which stays in fp32
_WIDE_ROWS = 4  # rows of hidden_size per token in a step: the residual, its norm, the sum, the queries
# The engine's own steps of 8B and 70B have up to 1.9 times the rows of one layer and 6 times the logits at a time, and
# graphs of up to 334 MB (test_memory_plan.py). Too much costs 0.5 % of an 80 GB card, too little is no start.
_ROW_COPIES, _LOGITS_COPIES = 2, 6
_GRAPH_BYTES = 350_000_000


@dataclass(frozen=True)
class MemoryPlan:
    """Bytes of one worker, or of each rank if several ranks share its layers and KV. `kernel_bytes` are the linear
    weights as the engine counts them; `step_bytes` is an estimate."""

    kernel_bytes: int
    other_weight_bytes: int  # embedding and norms
    step_bytes: int
    block_bytes: int
    block_size: int
    num_blocks: int
    process_bytes: int  # of the process and its libraries, with CUDA and its graphs

    @property
    def weight_bytes(self) -> int:
        return self.kernel_bytes + self.other_weight_bytes

    @property
    def kv_bytes(self) -> int:
        return self.num_blocks * self.block_bytes

    @property
    def num_kv_tokens(self) -> int:
        return self.num_blocks * self.block_size

    @property
    def total_bytes(self) -> int:
        return self.weight_bytes + self.step_bytes + self.kv_bytes + self.process_bytes


def linear_shapes(spec: ModelSpec, degree: int = 1) -> Counter[tuple[int, int]]:
    """Return how many linear weights of each (outputs, inputs) the layers have, without the output head; with `degree`
    ranks, those of one rank."""
    shapes = Counter[tuple[int, int]]()
    hidden, queries = spec.hidden_size, spec.num_heads * spec.head_dim // degree
    for layer in spec.layers:
        if spec.latent is None:
            shapes[queries + 2 * max(spec.num_kv_heads, degree) // degree * spec.head_dim, hidden] += 1
            shapes[hidden, queries] += 1
        if (experts := layer.experts) is None:
            shapes[(1 + spec.gated) * spec.intermediate_size // degree, hidden] += 1
            shapes[hidden, spec.intermediate_size // degree] += 1
            continue
        for whole, count in ((experts.intermediate_size, experts.num_experts), (experts.shared_size, 1)):
            if size := whole // degree:
                shapes[2 * size, hidden] += count
                shapes[hidden, size] += count
    return shapes


def held_weights(spec: ModelSpec, form: Form, on_cpu: bool, degree: int = 1, dtype: str = "bf16") -> HeldWeights:
    """Return what a worker, or each of `degree` ranks, holds of a model in a form. `dtype`: in which a worker computes
    if it rounds the weights. Raises ModelError if workers would refuse the degree or the form."""
    if why := unfit_for_ranks(spec, Shard(0, degree)) if degree > 1 else "":
        raise ModelError(f"tensor_parallel {degree}: {spec.folder}: {why}")
    if isinstance(form, StoredForm):
        return form.held(degree)
    for _, inputs in linear_shapes(spec):
        if form.startswith("int4-") and inputs % _group(form):
            raise ModelError(f"{spec.folder}: groups of {_group(form)} do not divide {inputs} inputs")
    head_form = _head_form(form)
    head = _bytes_of(head_form, -(-spec.vocab_size // degree), spec.hidden_size, on_cpu)
    layers = _layer_bytes(spec, form, on_cpu, degree)
    # fp16 runs at the rate of bf16. A CPU rounds rows for integer weights, and multiplies both at one rate.
    as_they_are = "fp32" if dtype == "fp32" and not on_cpu else "bf16"
    computes = form if form in ("int8", "fp8", "fp32") else as_they_are
    return HeldWeights(form, head_form, computes, layers, head, _other_bytes(spec, form))


def _head_form(form: str) -> str:
    return "int8" if form.startswith("int4-") else form


def _layer_bytes(spec: ModelSpec, form: str, on_cpu: bool, degree: int) -> int:
    shapes = linear_shapes(spec, degree)
    total = sum(count * _bytes_of(form, *shape, on_cpu) for shape, count in shapes.items())
    routers = sum(layer.experts.num_experts for layer in spec.layers if layer.experts is not None)
    # Weights that the table of shapes lacks (latent attention), without padding.
    whole = linear_shapes(spec).items()
    listed = sum(count * out * inputs for (out, inputs), count in whole) + routers * spec.hidden_size
    absorbed, absorbed_bytes = _absorbed(spec, form, on_cpu)
    rest = max(0, spec.num_layer_weights() - listed - absorbed)
    rest_bytes = _bytes_of(form, rest // spec.hidden_size, spec.hidden_size, False) + absorbed_bytes
    return total + rest_bytes // degree + routers * spec.hidden_size * _ROUTER_BYTES


def _absorbed(spec: ModelSpec, form: str, on_cpu: bool) -> tuple[int, int]:
    """Return how many weights of latent attention a worker absorbs, and their bytes: two products per head, whose
    weights stay floats in any form."""
    if (latent := spec.latent) is None:
        return 0, 0
    kept = form if form in _FLOATS else "none"
    keys = _bytes_of(kept, latent.rank, latent.nope_dim, on_cpu)
    values = _bytes_of(kept, latent.value_dim, latent.row_dim, on_cpu)
    num_products = spec.num_layers * spec.num_heads
    return num_products * latent.rank * (latent.nope_dim + latent.value_dim), num_products * (keys + values)


def _bits(form: str) -> int:
    return {"none": 16, "fp32": 32, "int8": 8, "fp8": 8}.get(form, 4)


def _bytes_of(form: str, out: int, inputs: int, on_cpu: bool) -> int:
    if on_cpu:
        out += -out % _PANEL
    values = out * inputs * _bits(form) // 8
    if form in ("int8", "fp8"):
        return values + out * _SCALE_BYTES
    if form in _FLOATS:
        return values
    return values + 2 * out * (inputs // _group(form)) * _SCALE_BYTES  # a scale and an offset per group


def _group(form: str) -> int:
    """Return the inputs of a group of int4-gN."""
    return int(form.rpartition("g")[2])


def _other_bytes(spec: ModelSpec, form: str) -> int:
    """Return the bytes of the embedding, if it is a table of its own, and of the norms."""
    shares, value_bytes = spec.tied and form in _FLOATS, 4 if form == "fp32" else 2
    return norm_bytes(spec, value_bytes) + (0 if shares else value_bytes * spec.vocab_size * spec.hidden_size)


def step_bytes(spec: ModelSpec, num_tokens: int, max_num_seqs: int) -> int:
    """Estimate the memory of the largest step: activations of all tokens, the MLP's width, and logits of all sequences
    in fp32, with copies of both."""
    widths = [(1 + spec.gated) * spec.intermediate_size]
    widths += [2 * e.num_chosen * e.intermediate_size for layer in spec.layers if (e := layer.experts) is not None]
    rows = num_tokens * 2 * (_WIDE_ROWS * spec.hidden_size + max(widths) + spec.num_heads * spec.head_dim)
    return _ROW_COPIES * rows + _LOGITS_COPIES * 4 * max_num_seqs * spec.vocab_size


def plan_memory(spec: ModelSpec, device: Device, config: EngineConfig, form: Form) -> MemoryPlan:
    """Return the memory of a worker with this config, whose dtypes are resolved. Raises ValueError if it does not fit,
    and ModelError as `held_weights` does."""
    if spec.state is not None:
        raise ValueError(f"{spec.folder}: models whose layers keep a state are not planned yet")
    on_cpu = device.kind == "cpu"
    layout = spec.kv_layout(config.kv_dtype, config.block_size)
    max_len = config.max_model_len or spec.context
    held = held_weights(spec, form, on_cpu, config.tensor_parallel)
    kernels, others = held.kernel_bytes, held.other_bytes
    step = step_bytes(spec, min(config.max_num_batched_tokens, max_len), config.max_num_seqs)
    if on_cpu:
        num_blocks = config.num_blocks or default_num_blocks(layout, config, max_len)
        plan = MemoryPlan(kernels, others, step, layout.block_bytes, config.block_size, num_blocks, PROCESS_BYTES)
        if plan.total_bytes > device.memory_bytes:
            raise ValueError(
                f"a worker takes {plan.total_bytes:,} bytes, this machine has {device.memory_bytes:,}; quantize"
            )
        return plan
    process = CONTEXT_BYTES + _GRAPH_BYTES
    memory = Memory(device.memory_bytes, device.memory_bytes - kernels - others, kernels + others + process)
    least = layout.num_blocks(min(max_len, config.max_num_batched_tokens))
    num_blocks = pool_blocks(memory, UTILIZATION, step, layout.block_bytes, least)
    return MemoryPlan(kernels, others, step, layout.block_bytes, config.block_size, num_blocks, process)
