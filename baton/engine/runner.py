"""From slices to tokens: builds the step's tensors, runs the model once, draws the next tokens."""

import torch
from torch import Tensor

from baton.engine.batch import ForwardBatch, SeqSlice
from baton.engine.kv.pool import KVPool
from baton.engine.models.llama import Model
from baton.engine.sampling.sampler import Sampled, SampleRow, Sampler
from baton.engine.scheduler import Slice
from baton.engine.sequence import Sequence

Drawn = tuple[Sequence, list[Sampled]]  # one token for each choice
NO_TOKENS: frozenset[int] = frozenset()


class Runner:
    """The model and its pool. Belongs to the loop's thread."""

    def __init__(self, model: Model, pool: KVPool, sampler: Sampler):
        self.model = model
        self.pool = pool
        self.sampler = sampler

    @torch.inference_mode()
    def run(self, slices: list[Slice]) -> list[Drawn]:
        """Computes the slices. For each sequence whose last token is among them the next one: a group at the end of its
        prompt draws one for each choice, from the same logits."""
        ends = [index for index, piece in enumerate(slices) if piece.end == piece.seq.num_tokens]
        batch = self._batch(slices, ends)
        logits = self.model.forward(batch, self.pool)
        if not ends:
            return []
        seqs = [slices[index].seq for index in ends]
        counts = [1 if seq.group.prefilled else seq.group.request.sampling.n for seq in seqs]
        if len(seqs) < sum(counts):
            logits = logits.repeat_interleave(torch.tensor(counts), dim=0)
        drawn = iter(self.sampler.sample(logits, [row for seq in seqs for row in self._rows(seq)]))
        return [(seq, [next(drawn) for _ in range(count)]) for seq, count in zip(seqs, counts, strict=True)]

    def copy_block(self, source: int, target: int) -> None:
        with torch.inference_mode():
            self.pool.copy_block(source, target)

    def _batch(self, slices: list[Slice], ends: list[int]) -> ForwardBatch:
        block_size = self.pool.block_size
        token_ids: list[int] = []
        positions: list[int] = []
        slots: list[int] = []
        seqs: list[SeqSlice] = []
        last_rows: list[int] = []
        for seq, begin, end in slices:
            seqs.append(SeqSlice(len(token_ids), end - begin, end, block_table(seq)))
            if end - begin == 1:
                token_ids.append(seq.token_ids[begin])
                positions.append(begin)
                slots.append(seq.block_ids[begin // block_size] * block_size + begin % block_size)
            else:
                token_ids += seq.token_ids[begin:end]
                positions += range(begin, end)
                slots += chunk_slots(seq.block_ids, begin, end, block_size)
            last_rows.append(len(token_ids) - 1)
        rows = [last_rows[index] for index in ends]
        as_tensor = torch.tensor
        return ForwardBatch(
            token_ids=as_tensor(token_ids, dtype=torch.int64),
            positions=as_tensor(positions, dtype=torch.int64),
            slots=as_tensor(slots, dtype=torch.int64),
            seqs=seqs,
            logit_rows=as_tensor(rows, dtype=torch.int64),
        )

    def _rows(self, seq: Sequence) -> list[SampleRow]:
        request = seq.group.request
        sampling = request.sampling
        banned = request.stop_token_ids if seq.num_output < request.min_tokens else NO_TOKENS
        choices = (seq.choice,) if seq.group.prefilled else range(sampling.n)
        penalized = sampling.repetition_penalty != 1 or sampling.presence_penalty or sampling.frequency_penalty
        border = request.num_prompt_tokens
        prompt, output = (seq.token_ids[:border], seq.token_ids[border:]) if penalized else ((), ())
        return [SampleRow(sampling, choice, seq.num_tokens, prompt, output, banned) for choice in choices]


def block_table(seq: Sequence) -> Tensor:
    """The sequence's block ids, int64. Who changes those sets it to None."""
    if seq.block_table is None:
        seq.block_table = torch.tensor(seq.block_ids, dtype=torch.int64)
    return seq.block_table


def chunk_slots(block_ids: list[int], begin: int, end: int, block_size: int) -> list[int]:
    """Where the KV of tokens [begin, end) goes, block by block."""
    slots: list[int] = []
    for index in range(begin // block_size, -(-end // block_size)):
        first = index * block_size
        base = block_ids[index] * block_size
        slots += range(base + max(begin - first, 0), base + min(end - first, block_size))
    return slots
