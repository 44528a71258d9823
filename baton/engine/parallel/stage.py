"""Stages of a model: the layers of each rank of a pipeline, and the parts in which a step passes through them."""

from dataclasses import dataclass, replace

import torch

from baton.engine.core.batch import ForwardBatch
from baton.engine.core.model_spec import ModelSpec

MIN_TOKENS = 64  # of a micro-batch: with fewer, a stage's time is that of reading its weights
MICRO_BATCHES = 4  # the most per stage: with 4 stages 3 of 19 turns are idle at each end


@dataclass(frozen=True, slots=True)
class PipelineStage:
    """Hold consecutive layers. The first stage also has the embedding, the final norm and the head, so rows come back
    to it."""

    index: int
    layers: range


def cut_layers(spec: ModelSpec, num_stages: int) -> list[PipelineStage]:
    """Divide a model so that the largest memory and time of a stage is as small as possible. Raises ValueError for more
    stages than layers.

    Costs are counted in weights: those that are held, plus those that a token uses. The first stage holds the embedding
    and the head, and uses the head.
    """
    if num_stages > spec.num_layers:
        raise ValueError(f"pipeline_parallel {num_stages}: the model has {spec.num_layers} layers")
    alone = [replace(spec, layers=(layer,)) for layer in spec.layers]
    costs = [each.num_layer_weights() + each.num_layer_weights(chosen_only=True) for each in alone]
    table = spec.vocab_size * spec.hidden_size
    ends = _cut([(3 - spec.tied) * table, *costs], num_stages)
    return [
        PipelineStage(index, range(begin - 1 if index else 0, end - 1))
        for index, (begin, end) in enumerate(zip([0, *ends], ends))
    ]


def _cut(costs: list[int], count: int) -> list[int]:
    """Return the ends of `count` runs of costs whose largest sum is as small as possible. The first run has at least
    two, since what comes before the layers is not a stage by itself."""
    sums = [0]
    for cost in costs:
        sums.append(sums[-1] + cost)
    # best[end]: the largest sum of the runs up to `end`, and where the last of them begins.
    best = {end: (sums[end], 0) for end in range(2, len(sums))}
    steps = [best]
    for runs in range(2, count + 1):
        best = {
            end: min((max(best[begin][0], sums[end] - sums[begin]), begin) for begin in range(runs, end))
            for end in range(runs + 1, len(sums))
        }
        steps.append(best)
    ends = [len(costs)]
    for best in reversed(steps[1:]):
        ends.append(best[ends[-1]][1])
    return ends[::-1]


def micro_batches(batch: ForwardBatch, num_stages: int) -> list[tuple[int, ForwardBatch]]:
    """Return a step as parts with about equal numbers of tokens, each with its first row: while a stage computes one,
    the stage before computes the next. A row has the same bits in any part."""
    num_tokens = len(batch.token_ids)
    count = max(1, min(num_tokens // MIN_TOKENS, MICRO_BATCHES * num_stages))
    borders = [_before_drafts(batch, num_tokens * index // count) for index in range(count + 1)]
    return [(begin, rows_of(batch, begin, end)) for begin, end in zip(borders, borders[1:]) if begin < end]


def _before_drafts(batch: ForwardBatch, row: int) -> int:
    """Return a row before which a step can be divided: not among proposals that a state does not take in, since later
    ones need the state from before the first."""
    for seq in batch.seqs:
        end = seq.query_start + seq.query_len
        if seq.state is not None and end - seq.state.num_drafts < row < end:
            return end - seq.state.num_drafts
    return row


def rows_of(batch: ForwardBatch, begin: int, end: int) -> ForwardBatch:
    """Return rows [begin, end) of a step that is on the host, as a step without logits; the rows before them are
    computed already."""
    seqs = []
    for seq in batch.seqs:
        first, last = max(seq.query_start, begin), min(seq.query_start + seq.query_len, end)
        if first < last:
            left = seq.query_start + seq.query_len - last
            state = seq.state
            if state is not None:
                pending = state.num_pending if first == seq.query_start else 0
                state = state._replace(num_pending=pending, num_drafts=max(0, state.num_drafts - left))
            own = replace(seq, query_start=first - begin, query_len=last - first, kv_len=seq.kv_len - left, state=state)
            seqs.append(own)
    adapters = tuple(
        rows._replace(begin=max(rows.begin, begin) - begin, end=min(rows.end, end) - begin)
        for rows in batch.adapters
        if max(rows.begin, begin) < min(rows.end, end)
    )
    own = slice(begin, end)
    return ForwardBatch(
        batch.token_ids[own], batch.positions[own], batch.slots[own], seqs, torch.empty(0, dtype=torch.int64),
        adapters=adapters,
    )  # fmt: skip
