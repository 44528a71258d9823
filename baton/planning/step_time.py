"""The seconds of a step: what each class of kernels reads and computes, by the rates of the device and its
efficiency."""

from typing import NamedTuple

from baton.engine.core.model_spec import ModelSpec
from baton.planning.devices import Device
from baton.planning.efficiency import Efficiencies
from baton.planning.memory import Form, held_weights
from baton.planning.virtual_engine import StepPieces


class StepBound(NamedTuple):
    """The parts of a step in seconds, and whether its matrix products are bound by memory."""

    linear_s: float
    head_s: float
    attention_s: float
    host_s: float
    is_memory_bound: bool

    @property
    def seconds(self) -> float:
        return self.linear_s + self.head_s + self.attention_s + self.host_s


class Roofs:
    """The roofline: the shortest time of each class of kernels, the longer of bytes over the rate of memory and
    operations over the rate of products."""

    def __init__(self, spec: ModelSpec, device: Device, form: Form, kv_form: str, dtype: str = "bf16"):
        """Compute the roofline of a model. `dtype`: in which workers compute that round the weights. Raises ValueError
        if the device has no products of this form."""
        self.spec, self.device = spec, device
        held = held_weights(spec, form, device.kind == "cpu", dtype=dtype)
        if held.computes not in device.flops_per_s:
            raise ValueError(f"{device.name} computes no {held.computes}")
        self._flops_per_s = device.flops_per_s[held.computes]
        self.form, self.head_form = held.form, held.head_form
        self.head_bytes, self.all_layer_bytes = held.head_bytes, held.layer_bytes
        per_weight = self.all_layer_bytes / spec.num_layer_weights()
        self._expert_bytes = per_weight * spec.num_expert_weights()
        self._chosen_bytes = per_weight * spec.num_expert_weights(chosen_only=True)
        self._token_flops = 2 * spec.num_layer_weights(chosen_only=True)
        layout = spec.kv_layout(kv_form, 64)
        self.kv_token_bytes = layout.block_bytes / layout.block_size
        self._pair_flops = 4 * spec.num_layers * spec.num_heads * spec.head_dim
        self._windows = [window for window in spec.windows if window is not None]

    @property
    def layer_bytes(self) -> float:
        return self.all_layer_bytes / self.spec.num_layers

    def is_cached(self, num_kv_tokens: float) -> bool:
        """Return whether weights and KV of `num_kv_tokens` all stay in the cache until the next step. If they are
        larger together, they evict one another."""
        read = self.all_layer_bytes + self.head_bytes + num_kv_tokens * self.kv_token_bytes
        return read <= self.device.cache_bytes

    def _read_s(self, num_bytes: float, is_cached: bool) -> float:
        return num_bytes / (self.device.cache_bytes_per_s if is_cached else self.device.bytes_per_s)

    def linear_s(self, num_tokens: int, is_cached: bool = False) -> tuple[float, bool]:
        """Return the seconds of all layers' products, and whether they are bound by memory."""
        experts = min(num_tokens * self._chosen_bytes, self._expert_bytes)
        memory_s = self._read_s(self.all_layer_bytes - self._expert_bytes + experts, is_cached)
        compute_s = num_tokens * self._token_flops / self._flops_per_s
        return max(memory_s, compute_s), memory_s >= compute_s

    def head_s(self, num_rows: int, is_cached: bool = False) -> float:
        compute_s = 2 * num_rows * self.spec.vocab_size * self.spec.hidden_size / self._flops_per_s
        return max(self._read_s(self.head_bytes, is_cached), compute_s)

    def decode_attention_s(self, num_tokens: float, is_cached: bool = False) -> float:
        """Return the attention seconds of decoding sequences that see `num_tokens` tokens in total."""
        memory_s = self._read_s(num_tokens * self.kv_token_bytes, is_cached)
        return max(memory_s, num_tokens * self._pair_flops / self._flops_per_s)

    def prefill_attention_s(self, num_pairs: float, num_tokens: float) -> float:
        """Return the attention seconds of prompts: `num_pairs` of a token and a position that it sees, `num_tokens`
        whose KV is read."""
        compute_s = num_pairs * self._pair_flops / self.device.flops_per_s["bf16"]
        return max(compute_s, num_tokens * self.kv_token_bytes / self.device.bytes_per_s)

    def seen(self, kv_len: int) -> float:
        """Return how many of `kv_len` tokens a layer sees, on average over the layers."""
        if not self._windows:
            return kv_len
        windowed = sum(min(window, kv_len) for window in self._windows)
        return (windowed + (self.spec.num_layers - len(self._windows)) * kv_len) / self.spec.num_layers

    def pairs(self, num: int, kv_len: int) -> float:
        """Return the pairs of the last `num` tokens of `kv_len` and the positions that they see."""
        return num * self.seen(kv_len) * (1 - num / (2 * kv_len))


class StepTimes:
    """Step times of one model in one form on one device; `degree` devices share each layer."""

    def __init__(
        self,
        spec: ModelSpec,
        device: Device,
        efficiencies: Efficiencies,
        form: Form,
        kv_form: str,
        degree: int = 1,
        dtype: str = "bf16",
    ):
        self.spec, self.device, self.efficiencies = spec, device, efficiencies
        self.roofs, self.degree = Roofs(spec, device, form, kv_form, dtype), degree

    @property
    def kv_token_bytes(self) -> float:
        return self.roofs.kv_token_bytes

    def __call__(self, step: StepPieces) -> float:
        return self.bound(step).seconds

    def bound(self, step: StepPieces) -> StepBound:
        """Return the parts of a step's time."""
        roofs, efficiency_of = self.roofs, self.efficiencies.of
        num_tokens, num_rows = sum(num for num, _ in step.pieces), step.num_rows
        is_cached = roofs.is_cached(sum(roofs.seen(kv_len) for _, kv_len in step.pieces))
        linear_s, is_memory = roofs.linear_s(num_tokens, is_cached)
        linear_s /= efficiency_of("linear", roofs.form, roofs.layer_bytes, num_tokens, is_cached)
        head_s = 0.0
        if num_rows:
            head_s = roofs.head_s(num_rows, is_cached)
            head_s /= efficiency_of("head", roofs.head_form, roofs.head_bytes, num_rows, is_cached)
        linear_s, head_s, attention_s = (
            each / self.degree for each in (linear_s, head_s, self._attention(step, is_cached))
        )
        host = self.efficiencies.host
        return StepBound(linear_s, head_s, attention_s, host.step_s + host.sequence_s * len(step.pieces), is_memory)

    def decode_s(self, num_seqs: int, context: float) -> float:
        """Return the seconds of a step in which `num_seqs` sequences of this context decode."""
        return self(StepPieces(((1, round(context)),) * num_seqs, num_seqs))

    def prefill_s(self, num_tokens: int, chunk: int) -> float:
        """Return the seconds to read a prompt alone, in chunks."""
        ends = [*range(chunk, num_tokens, chunk), num_tokens]
        steps = [StepPieces(((end - begin, end),), int(end == num_tokens)) for begin, end in zip([0, *ends], ends)]
        return sum(self(step) for step in steps)

    def _attention(self, step: StepPieces, is_cached: bool) -> float:
        roofs, seconds = self.roofs, 0.0
        decoding = [roofs.seen(kv_len) for num, kv_len in step.pieces if num == 1]
        if decoding:
            size = sum(decoding) / len(decoding) * roofs.kv_token_bytes
            efficiency = self.efficiencies.of("decode_attention", "*", size, len(decoding), is_cached)
            seconds += roofs.decode_attention_s(sum(decoding), is_cached) / efficiency
        for num, kv_len in step.pieces:
            if num > 1:
                size = kv_len * roofs.kv_token_bytes
                efficiency = self.efficiencies.of("prefill_attention", "*", size, num)
                seconds += roofs.prefill_attention_s(roofs.pairs(num, kv_len), kv_len) / efficiency
        return seconds
