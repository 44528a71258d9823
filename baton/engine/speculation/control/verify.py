"""Verify proposals: one target pass reads a sequence's last token and its proposals, and those that the target draws
itself are accepted.

    token_ids      ... t              row of t    draws what comes after t             == draft 0 ?
    draft_ids          d0 d1 d2       row of d0   draws what comes after t d0          == draft 1 ?  ...
                                      the row after the last accepted proposal gives one more token for nothing

Exact, not only in distribution: each row is drawn with the noise of its own position and the history before it, as in
a plain step, so the tokens are those of plain decoding whatever was proposed.
"""

from collections.abc import Sequence as Seq

from torch import Tensor

from baton.engine.core.request import Request
from baton.engine.sampling.penalties import changes
from baton.engine.sampling.sampler import NO_TOKENS, Sampled, Sampler, sample_row
from baton.engine.schedule.sequence import Sequence


def verify(sampler: Sampler, logits: Tensor, seqs: Seq[Sequence], first_rows: Seq[int]) -> list[list[Sampled]]:
    """Return for each sequence the tokens it continues with: the accepted proposals and one more.

    `logits` fp32 [R, vocab_size]; a sequence has 1 + len(draft_ids) rows from its first one on.
    """
    runs: list[list[Sampled]] = [[] for _ in seqs]
    at_once: list[int] = []
    one_by_one: list[int] = []
    for index, seq in enumerate(seqs):
        (at_once if not seq.draft_ids or _is_cheap(seq.group.request) else one_by_one).append(index)
    if at_once:
        _draw_all(sampler, logits, seqs, first_rows, at_once, runs)
    if one_by_one:
        _draw_while_right(sampler, logits, seqs, first_rows, one_by_one, runs)
    return runs


def num_right(samples: Seq[Sampled], draft_ids: Seq[int]) -> int:
    """Return how many of the proposals are among the tokens that a sequence continues with."""
    return sum(sample.token_id == draft_id for sample, draft_id in zip(samples, draft_ids, strict=False))


def _is_cheap(request: Request) -> bool:
    """Return whether a row costs less than a call of its own: no filter that sorts, no history to count."""
    params = request.sampling
    return not params.has_filters and not changes(params, request.stop_token_ids if request.min_tokens else NO_TOKENS)


def _draw_all(sampler, logits, seqs, first_rows, chosen, runs) -> None:
    """Draw all rows in one call; those after the first wrong proposal are thrown away."""
    rows, indices = [], []
    for index in chosen:
        seq = seqs[index]
        request = seq.group.request
        num_rows = 1 + len(seq.draft_ids)
        indices += range(first_rows[index], first_rows[index] + num_rows)
        rows += [
            sample_row(
                request, request.sampling, seq.choice, seq.token_ids, seq.draft_ids[:position], seq.mask(position)
            )
            for position in range(num_rows)
        ]
    drawn = iter(sampler.sample(logits if len(indices) == len(logits) else logits[indices], rows))
    for index in chosen:
        draft_ids, run, going_on = seqs[index].draft_ids, runs[index], True
        for position in range(1 + len(draft_ids)):
            sampled = next(drawn)
            if going_on:
                run.append(sampled)
                going_on = position < len(draft_ids) and sampled.token_id == draft_ids[position]


def _draw_while_right(sampler, logits, seqs, first_rows, chosen, runs) -> None:
    """Draw position by position, for the sequences whose proposals were right so far."""
    position = 0
    while chosen:
        rows = []
        for index in chosen:
            seq = seqs[index]
            request = seq.group.request
            draft_ids = seq.draft_ids[:position]
            mask = seq.mask(position)
            rows.append(sample_row(request, request.sampling, seq.choice, seq.token_ids, draft_ids, mask))
        drawn = sampler.sample(logits[[first_rows[index] + position for index in chosen]], rows)
        going_on = []
        for index, sampled in zip(chosen, drawn, strict=True):
            runs[index].append(sampled)
            draft_ids = seqs[index].draft_ids
            if position < len(draft_ids) and sampled.token_id == draft_ids[position]:
                going_on.append(index)
        chosen, position = going_on, position + 1
