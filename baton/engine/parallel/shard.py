"""The division of a model among ranks: heads of attention, outputs of linears that widen a row, inputs of those that
narrow it."""

from dataclasses import dataclass

from baton.engine.core.model_spec import ModelSpec
from baton.engine.core.state_spec import StateSpec


@dataclass(frozen=True, slots=True)
class Shard:
    """Describe the part of rank `rank` of `degree`, a power of two."""

    rank: int
    degree: int
    whole_experts: bool = False  # of a mixture: a rank has some experts, not a part of each

    def range_of(self, size: int) -> range:
        """Return this rank's part of `size`, equal for all if `degree` divides it; the last one's may be shorter."""
        each = -(-size // self.degree)
        return range(min(size, self.rank * each), min(size, (self.rank + 1) * each))

    def kv_heads(self, num_kv_heads: int) -> range:
        """Return the KV heads that this rank's queries read. With fewer heads than ranks, several ranks have the same
        one and write equal bytes."""
        if num_kv_heads >= self.degree:
            return self.range_of(num_kv_heads)
        head = self.rank * num_kv_heads // self.degree
        return range(head, head + 1)


WHOLE = Shard(0, 1)
VECTOR = 16  # elements of a row that is summed


def unfit_for_ranks(spec: ModelSpec, shard: Shard) -> str:
    """Return why a model cannot be divided as `shard` says; "" if it can."""
    degree = shard.degree
    if spec.state is not None and (why := _undivided(spec.state, degree)):
        fitting = next(each for each in (4, 2, 1) if each < degree and not _undivided(spec.state, each))
        return f"{why}; {fitting} would do" if fitting > 1 else f"{why}, nor do fewer: leave tensor_parallel at 1"
    if spec.kv_layers and spec.num_heads % degree:
        return f"{degree} ranks do not divide {spec.num_heads} heads of attention"
    if spec.kv_layers and spec.num_kv_heads % degree and degree % spec.num_kv_heads:
        return f"{degree} ranks and {spec.num_kv_heads} KV heads: one must be a multiple of the other"
    if spec.hidden_size % VECTOR:
        return f"hidden size {spec.hidden_size} is not a multiple of {VECTOR}"
    for layer in spec.layers:
        if layer.experts is not None and layer.experts.latent_size % VECTOR:
            return f"rows of experts have {layer.experts.latent_size} elements, no multiple of {VECTOR}"
    if shard.whole_experts:
        counts = {layer.experts.num_experts for layer in spec.layers if layer.experts is not None}
        if not counts:
            return "expert_parallel has no effect on a model without experts; leave it out"
        if undivided := [count for count in counts if count % degree]:
            return f"expert_parallel: {degree} ranks do not divide {undivided[0]} experts"
    return ""


def _undivided(state: StateSpec, degree: int) -> str:
    """Return why layers with a state cannot be divided; "" if they can."""
    num_heads, num_groups = state.parts
    if num_heads % degree:
        return f"{degree} ranks do not divide {num_heads} heads with a state"
    if num_groups % degree and degree % num_groups:
        return f"{degree} ranks do not divide {num_groups} groups of heads with a state, nor does that divide the ranks"
    part = state.part(num_heads // degree, max(1, num_groups // degree))
    for size in (part.inner_size, part.conv_size):
        if size % VECTOR:
            return f"{degree} ranks do not divide layers with a state: one would have {size} elements, no multiple of {VECTOR}"
    num_norms = state.num_norms
    if num_norms % degree and degree % max(1, num_norms):
        return f"{degree} ranks do not divide {num_norms} norms of a row with a state, nor does that divide the ranks"
    return ""
