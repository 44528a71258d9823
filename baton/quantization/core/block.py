"""One decoder layer in fp32, through which a calibration set runs stage by stage while the layer's weights are
replaced.

The engine's own layers merge products behind kernels. Here every linear is separate, under its name in the folder, and
its inputs can be observed before it is applied."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from baton.engine.attention.base import visible
from baton.engine.core.model_spec import ModelSpec, TensorNames
from baton.engine.layers.rope import Rope, order_of_head

Q, K, V, O = (f"self_attn.{name}_proj" for name in "qkvo")  # noqa: E741
GATE, UP, DOWN = (f"mlp.{name}_proj" for name in ("gate", "up", "down"))
INPUT_NORM, MLP_NORM = "input_layernorm", "post_attention_layernorm"
Q_NORM, K_NORM = "self_attn.q_norm", "self_attn.k_norm"
STAGES = ((Q, K, V), (O,), (GATE, UP), (DOWN,))
# Where the inputs of a stage come from, channel by channel: a division of the inputs can be folded into the source.
SOURCES = {Q: INPUT_NORM, O: V, GATE: MLP_NORM, DOWN: UP}

Read = Callable[[str, tuple[int, ...]], Tensor]  # (tensor name, shape) -> tensor as stored


@dataclass
class Stage:
    """Linears that read the same inputs, just before they are applied."""

    names: tuple[str, ...]
    inputs: list[Tensor]  # of each sample, fp32 [tokens, in]; may be changed in place

    @property
    def source(self) -> str:
        return SOURCES[self.names[0]]

    def largest(self) -> Tensor:
        """Return max |x| of every input channel, [in]."""
        return torch.stack([x.abs().amax(dim=0) for x in self.inputs]).amax(dim=0)

    def second_moment(self) -> Tensor:
        """Return the mean of x x^T over all tokens, [in, in]: half the Hessian of a layer's squared output error."""
        total = torch.zeros(self.inputs[0].shape[1], self.inputs[0].shape[1])
        for x in self.inputs:
            total.addmm_(x.T, x)
        return total / sum(len(x) for x in self.inputs)

    def rows(self, count: int) -> Tensor:
        """Return about `count` inputs, evenly spread over the samples, [rows, in]."""
        step = max(1, sum(len(x) for x in self.inputs) // count)
        return torch.cat([x[index % step :: step] for index, x in enumerate(self.inputs)])


def linear_shapes(spec: ModelSpec) -> dict[str, tuple[int, int]]:
    """Return [out, in] of every linear of a layer that a Block computes."""
    hidden, size = spec.hidden_size, spec.intermediate_size
    q_size, kv_size = spec.num_heads * spec.head_dim, spec.num_kv_heads * spec.head_dim
    attention = {Q: (q_size, hidden), K: (kv_size, hidden), V: (kv_size, hidden), O: (hidden, q_size)}
    return attention | {GATE: (size, hidden), UP: (size, hidden), DOWN: (hidden, size)}


def unfit(spec: ModelSpec) -> str:
    """Return which property of a model's layers a Block cannot compute; "" if it can compute them."""
    if reason := spec.differs_from_llama():
        return reason
    if spec.names != TensorNames() or any(order_of_head(rope, spec.head_dim) for rope in spec.ropes):
        return "q, k, v as this family stores them"
    if len(spec.ropes) > 1 or spec.attention_scale is not None or spec.attention_softcap is not None:
        return "this family's attention"
    return "a scaled embedding" if spec.embedding_scale != 1 else ""


class LayerWeights:
    """Some linears of one layer by their names below `model.layers.N.`, fp32 [out, in]."""

    def __init__(self, weights: dict[str, Tensor]):
        self.weights = weights


class Block(LayerWeights):
    """Weights, biases and norms of one layer by their names below `model.layers.N.`, all fp32. Raises what `read`
    raises."""

    def __init__(self, spec: ModelSpec, index: int, read: Read, rope: Rope):
        self.spec, self.index, self._rope = spec, index, rope
        shapes = linear_shapes(spec)
        biased = {Q: spec.qkv_bias, K: spec.qkv_bias, V: spec.qkv_bias, O: spec.output_bias}
        norms = {INPUT_NORM: spec.hidden_size, MLP_NORM: spec.hidden_size}
        norms |= {Q_NORM: spec.head_dim, K_NORM: spec.head_dim} if spec.qk_norm else {}

        def get(name: str, *shape: int) -> Tensor:
            return read(f"model.layers.{index}.{name}", shape).float()

        super().__init__({name: get(f"{name}.weight", *shape) for name, shape in shapes.items()})
        self.biases = {
            name: get(f"{name}.bias", shape[0]) for name, shape in shapes.items() if biased.get(name, spec.mlp_bias)
        }
        self.norms = {name: get(f"{name}.weight", size) for name, size in norms.items()}

    @torch.inference_mode()
    def run(self, samples: list[Tensor], visit: Callable[[Stage], None] = lambda stage: None) -> list[Tensor]:
        """Return the layer's outputs [tokens, hidden_size] for each sample.

        `visit` is called with every stage before its linears are applied. It may replace `weights`, which then produce
        what later stages read, and scale the stage's inputs."""
        inputs = [self._norm(INPUT_NORM, x) for x in samples]
        visit(Stage(STAGES[0], inputs))
        inputs = [self._attend(x) for x in _consumed(inputs)]
        visit(Stage(STAGES[1], inputs))
        samples = [x + self.apply(O, mixed) for x, mixed in zip(samples, _consumed(inputs), strict=True)]
        inputs = [self._norm(MLP_NORM, x) for x in samples]
        visit(Stage(STAGES[2], inputs))
        inputs = [F.silu(self.apply(GATE, x)) * self.apply(UP, x) for x in _consumed(inputs)]
        visit(Stage(STAGES[3], inputs))
        return [x + self.apply(DOWN, h) for x, h in zip(samples, _consumed(inputs), strict=True)]

    def apply(self, name: str, x: Tensor) -> Tensor:
        """Apply linear `name` to x [tokens, in]: [tokens, out]."""
        return F.linear(x, self.weights[name], self.biases.get(name))

    def _norm(self, name: str, x: Tensor) -> Tensor:
        return F.rms_norm(x, x.shape[-1:], self.norms[name], self.spec.norm.eps)

    def _attend(self, x: Tensor) -> Tensor:
        spec = self.spec
        q, k, v = (self.apply(name, x).unflatten(1, (-1, spec.head_dim)) for name in (Q, K, V))
        if spec.qk_norm:
            q, k = self._norm(Q_NORM, q), self._norm(K_NORM, k)
        positions = torch.arange(x.shape[0])
        cos, sin = self._rope.tables(positions, torch.float32)
        q, k = self._rope(q, cos, sin), self._rope(k, cos, sin)
        mask = visible(positions, positions, spec.windows[self.index])
        q, k, v = (heads.transpose(0, 1).unsqueeze(0) for heads in (q, k, v))
        mixed = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=spec.head_dim**-0.5, enable_gqa=True)
        return mixed[0].transpose(0, 1).flatten(1)


def _consumed(tensors: list[Tensor]) -> Iterator[Tensor]:
    """Yield and drop each tensor in turn, so that a stage's inputs and outputs are never all in memory."""
    tensors.reverse()
    while tensors:
        yield tensors.pop()
