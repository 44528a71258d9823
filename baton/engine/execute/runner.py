"""Run a step: build its tensors from slices, run the model, and draw the next tokens.

run             compute a step of any kind and return its tokens
launch, read    launch a step whose tokens are drawn on the device; the next one may continue from them before they are
                read. With several pipeline stages, launch a step of any kind, which continues in the other stages
                while the next one, of other sequences, is launched
"""

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from baton import failpoints
from baton.engine.core.batch import AdapterRows, ForwardBatch, SeqSlice, StateRows
from baton.engine.core.pooling import Pooler
from baton.engine.execute.launcher import LaunchedTokens, Launcher, StagedLauncher
from baton.engine.execute.thread_count import ThreadCount
from baton.engine.kv.pool import KVPool
from baton.engine.models.decoder import Model
from baton.engine.models.fused import FusedLayers
from baton.engine.sampling.on_device import plain_row
from baton.engine.sampling.sampler import Sampled, Sampler, label_logprobs, prompt_logprobs, sample_row
from baton.engine.schedule.sequence import Sequence
from baton.engine.schedule.steps import Drawn, Slice
from baton.engine.speculation.control.verify import verify

EMPTY: Mapping[Sequence, int] = {}
HiddenAndLogits = tuple[Tensor | None, Tensor]
POOLED_ROWS = 512  # rows of a prompt that are normed at a time


@dataclass(frozen=True, slots=True)
class Flight:
    """A launched step that was not read yet."""

    slices: list[Slice]
    launched_at: float  # time.monotonic()
    read: Callable[[], list[Drawn]]  # waits for the step
    sampled_seqs: list[Sequence]  # of the slices after which a token is drawn
    tokens: LaunchedTokens | None = None  # one for each of these sequences, if the launch draws them


class Runner:
    """Runs steps of one model and pool. Belongs to the loop's thread."""

    def __init__(self, model: Model, pool: KVPool, sampler: Sampler, launcher: Launcher | None = None):
        """Take a model, its pool and a sampler; `launcher` is Launcher by default."""
        self.model = model
        self.pool = pool
        self.sampler = sampler
        self.launcher = launcher or Launcher(model, pool)
        self.threads = ThreadCount(torch.get_num_threads(), is_measured=isinstance(model.fused, FusedLayers))
        self.keeps_hidden = False  # whether `hidden` is needed after a step
        self.hidden: Tensor | None = None  # the rows of the last step that its tokens were drawn from

    @torch.inference_mode()
    def run(self, slices: list[Slice], on_layer: Callable[[int], None] | None = None) -> list[Drawn]:
        """Compute the slices and return the drawn tokens. `on_layer(layer)` is called as each layer's KV is written.

        Every sequence whose last token is computed gets the tokens that follow: its right proposals and one more. A
        group at the end of its prompt draws one token for each choice, from the same logits.
        """
        batch, seqs = self._batch(slices)
        drawn = self._computed(slices, batch, seqs, partial(self.launcher.run, batch, self.keeps_hidden, on_layer))
        self.launcher.wait()
        return drawn

    @torch.inference_mode()
    def _computed(
        self, slices: list[Slice], batch: ForwardBatch, seqs: list[Sequence], compute: Callable[..., HiddenAndLogits]
    ) -> list[Drawn]:
        """Compute hidden rows and logits by `compute(on_hidden)`, and draw the tokens."""
        reads = any(not piece.seq.group.reads_cache for piece in slices)
        hidden: list[Tensor] = []
        self.hidden, logits = compute(hidden.append if reads else None)
        for seq in seqs:  # on a GPU, while the launch computes
            seq.find_masks()
        if any(seq.draft_ids for seq in seqs):
            drawn = self._verified(logits, seqs)
        else:
            drawn = self._drawn(logits, seqs) if seqs else []
        if reads:
            self._read_prompts(hidden[0], slices, batch)
        return drawn

    @torch.inference_mode()
    def launch(
        self, slices: list[Slice], previous: Flight | None = None, on_layer: Callable[[int], None] | None = None
    ) -> Flight:
        """Launch a step for which `can_launch` is true.

        `previous`: the flight whose tokens it may continue from. `on_layer(layer)` is called when the step is read, as
        each layer's KV is written.
        """
        launched_at = time.monotonic()
        if isinstance(self.launcher, StagedLauncher):
            batch, seqs = self._batch(slices)
            finish = partial(self.launcher.finish, self.launcher.begin(batch), on_layer)
            return Flight(slices, launched_at, partial(self._computed, slices, batch, seqs, finish), seqs)
        known = {} if previous is None else {seq: row for row, seq in enumerate(previous.sampled_seqs)}
        batch, seqs = self._batch(slices, known)
        rows = [plain_row(piece.seq.group.request, piece.seq.choice, piece.end) for piece in slices if draws(piece)]
        continues = previous is not None and any(begin >= seq.num_tokens for seq, begin, _ in slices)

        def draw(logits: Tensor) -> Tensor:
            return self.sampler.draw(logits, rows) if rows else logits.new_empty(0, dtype=torch.int64)

        tokens = self.launcher.launch(batch, draw, previous.tokens if continues else None, on_layer)
        return Flight(slices, launched_at, partial(_read, seqs, tokens), seqs, tokens)

    def can_launch(self, slices: list[Slice]) -> bool:
        """Return whether a step may be launched ahead.

        If a launch draws tokens, the step may output only KV and one token a sequence drawn on the device. Otherwise
        any step may be launched.
        """
        return not self.launcher.draws or all(map(_gives_tokens_alone, slices))

    def _read_prompts(self, hidden: Tensor, slices: list[Slice], batch: ForwardBatch) -> None:
        """Add a step's prompt log-probabilities and pooled rows to the groups that asked for them.

        `hidden`: the rows of all tokens of the step.
        """
        for (seq, begin, end), rows in zip(slices, batch.seqs, strict=True):
            group = seq.group
            if group.reads_cache:
                continue
            own = hidden[rows.query_start : rows.query_start + end - begin]
            if (count := group.request.sampling.prompt_logprobs) is not None:
                token_ids = seq.token_ids[begin + 1 : min(end + 1, group.request.num_prompt_tokens)]
                del group.prompt_logprobs[begin:]  # if it was preempted, and is computed again
                group.prompt_logprobs += prompt_logprobs(own, token_ids, count, self.model.logits)
            if group.pooler is not None:
                self._add_to_pooler(group.pooler, own, begin)
            if group.pooler is not None and end == seq.num_tokens:
                labels = group.pooler.params.label_token_ids
                found = label_logprobs(self.model.logits(own[-1:]), labels) if labels else group.pooler.vector()
                group.pooled = tuple(found)

    def _add_to_pooler(self, pooler: Pooler, hidden: Tensor, begin: int) -> None:
        """Add the rows of a chunk, unless only the end of the prompt counts."""
        if not pooler.params.label_token_ids:
            for at in range(0, len(hidden), POOLED_ROWS):
                pooler.add(self.model.normed(hidden[at : at + POOLED_ROWS]), begin + at)

    def _drawn(self, logits: Tensor, seqs: list[Sequence]) -> list[Drawn]:
        """Draw for sequences that have one row of logits each."""
        counts = [1 if seq.group.prefilled else seq.group.request.sampling.n for seq in seqs]
        if len(seqs) < sum(counts):
            logits = logits.repeat_interleave(
                torch.tensor(counts, device=logits.device), dim=0, output_size=sum(counts)
            )
        rows = []
        for seq in seqs:
            request = seq.group.request
            choices = (seq.choice,) if seq.group.prefilled else range(request.sampling.n)
            mask = seq.mask(0)
            rows += [sample_row(request, request.sampling, choice, seq.token_ids, (), mask) for choice in choices]
        drawn = iter(self.sampler.sample(logits, rows))
        return [(seq, [next(drawn) for _ in range(count)]) for seq, count in zip(seqs, counts, strict=True)]

    def _verified(self, logits: Tensor, seqs: list[Sequence]) -> list[Drawn]:
        """Draw for all sequences of a step with proposals. Each has a row of `logits` for its last token and its
        proposals."""
        first_rows, num_rows = {}, 0
        for seq in seqs:
            first_rows[seq] = num_rows
            num_rows += 1 + len(seq.draft_ids)
        decoding = [seq for seq in seqs if seq.group.prefilled]
        runs = dict(zip(decoding, verify(self.sampler, logits, decoding, [first_rows[seq] for seq in decoding])))
        if others := [seq for seq in seqs if not seq.group.prefilled]:
            runs.update(self._drawn(logits[[first_rows[seq] for seq in others]], others))
        return [(seq, runs[seq]) for seq in seqs]

    def copy_block(self, source: int, target: int) -> None:
        with torch.inference_mode():
            self.pool.copy_block(source, target)

    def copy_state(self, source: int, target: int) -> None:
        with torch.inference_mode():
            self.pool.states.copy(source, target)

    def _batch(
        self, slices: list[Slice], rows_before: Mapping[Sequence, int] = EMPTY
    ) -> tuple[ForwardBatch, list[Sequence]]:
        """Return a step's inputs, and the sequences for which a token is drawn.

        `rows_before`: for sequences whose last token is still being drawn, its row in the previous launch.
        """
        ends = [index for index, piece in enumerate(slices) if draws(piece)]
        block_size = self.pool.block_size
        token_ids: list[int] = []
        positions: list[int] = []
        slots: list[int] = []
        seqs: list[SeqSlice] = []
        for seq, begin, end in slices:
            if seq.draft_ids:
                token_ids += seq.token_ids[begin:end]
                token_ids += seq.draft_ids
                end += len(seq.draft_ids)
                positions += range(begin, end)
                slots += chunk_slots(seq.blocks.ids, begin, end, block_size)
            elif end - begin == 1:
                known = begin < len(seq.token_ids)
                token_ids.append(seq.token_ids[begin] if known else ~rows_before[seq])
                positions.append(begin)
                slots.append(seq.blocks.ids[begin // block_size] * block_size + begin % block_size)
            else:
                token_ids += seq.token_ids[begin:end]
                positions += range(begin, end)
                slots += chunk_slots(seq.blocks.ids, begin, end, block_size)
            rows = state_rows(seq) if self.pool.states is not None else None
            seqs.append(SeqSlice(len(token_ids) - (end - begin), end - begin, end, block_table(seq), rows))
        failpoints.hit("engine.batch", token_ids)
        rows: list[int] = []
        for index in ends:
            last_row = seqs[index].query_start + seqs[index].query_len - 1
            rows += range(last_row - len(slices[index].seq.draft_ids), last_row + 1)
        as_tensor = torch.tensor
        batch = ForwardBatch(
            token_ids=as_tensor(token_ids, dtype=torch.int64),
            positions=as_tensor(positions, dtype=torch.int64),
            slots=as_tensor(slots, dtype=torch.int64),
            seqs=seqs,
            logit_rows=as_tensor(rows, dtype=torch.int64),
            adapters=adapter_rows(slices, seqs),
        )
        return batch, [slices[index].seq for index in ends]


def _read(seqs: list[Sequence], tokens: LaunchedTokens) -> list[Drawn]:
    return [(seq, [Sampled(token_id, None)]) for seq, token_id in zip(seqs, tokens.read(), strict=True)]


def adapter_rows(slices: list[Slice], seqs: list[SeqSlice]) -> tuple[AdapterRows, ...]:
    """Return the rows that use an adapter, neighbours with the same one together."""
    found: list[AdapterRows] = []
    for piece, rows in zip(slices, seqs, strict=True):
        adapter, end = piece.seq.group.adapter, rows.query_start + rows.query_len
        if adapter is None:
            continue
        if found and found[-1].end == rows.query_start and found[-1].adapter is adapter:
            found[-1] = found[-1]._replace(end=end)
        else:
            found.append(AdapterRows(rows.query_start, end, adapter))
    return tuple(found)


def draws(piece: Slice) -> bool:
    """Return whether a token is drawn after this slice: it ends its sequence, and the prompt is answered, not
    pooled."""
    return piece.end >= piece.seq.num_tokens and piece.seq.group.pooler is None


def _gives_tokens_alone(piece: Slice) -> bool:
    group = piece.seq.group
    if not group.reads_cache:  # it outputs something for each token of the prompt
        return False
    if not draws(piece):
        return True
    one = group.prefilled or group.request.sampling.n == 1
    return one and plain_row(group.request, piece.seq.choice, piece.end) is not None


def block_table(seq: Sequence) -> Tensor:
    """Return the sequence's block ids, int64 [blocks], cached. Code that changes `block_ids` resets `block_table`."""
    if seq.blocks.table is None:
        seq.blocks.table = torch.tensor(seq.blocks.ids, dtype=torch.int64)
    return seq.blocks.table


def state_rows(seq: Sequence) -> StateRows:
    """Return what a step does to the state of a sequence."""
    assert seq.recurrent.block_id is not None and seq.recurrent.is_ready
    return StateRows(seq.recurrent.block_id, seq.recurrent.num_pending, len(seq.draft_ids))


def chunk_slots(block_ids: list[int], begin: int, end: int, block_size: int) -> list[int]:
    """Return the slots at which the KV of tokens [begin, end) is written."""
    slots: list[int] = []
    for index in range(begin // block_size, -(-end // block_size)):
        first = index * block_size
        base = block_ids[index] * block_size
        slots += range(base + max(begin - first, 0), base + min(end - first, block_size))
    return slots
