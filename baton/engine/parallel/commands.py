"""What the first rank tells the others to compute: a step, or something of rows. Told as int64 and as rows.

header   [kind, tokens or rows, logit rows, sequences, block ids of all sequences]
step     token_ids, positions, slots, logit_rows; query_start, query_len, kv_len and number of blocks of each
         sequence; their block ids
"""

from enum import IntEnum

import torch
from torch import Tensor

from baton.engine.core.batch import ForwardBatch, SeqSlice
from baton.engine.parallel.collectives import Collectives

HEADER = 5


class CommandKind(IntEnum):
    """What is told."""

    STEP = 1
    LOGITS = 2  # of rows [R, hidden_size] that a step left
    EMBEDDED = 3  # rows of the embedding, of token ids [R]
    SCORED = 4  # what the head says of rows [R, hidden_size]


def tell_step(collectives: Collectives, batch: ForwardBatch) -> None:
    """Tell all ranks the inputs of a step."""
    seqs = [number for seq in batch.seqs for number in (seq.query_start, seq.query_len, seq.kv_len, len(seq.block_ids))]
    block_ids = torch.cat([seq.block_ids for seq in batch.seqs])
    parts = (batch.token_ids, batch.positions, batch.slots, batch.logit_rows, torch.tensor(seqs), block_ids)
    counts = (len(batch.token_ids), len(batch.logit_rows), len(batch.seqs), len(block_ids))
    collectives.tell(torch.tensor((CommandKind.STEP, *counts)))
    collectives.tell(torch.cat(parts))


def tell_rows(collectives: Collectives, kind: CommandKind, rows: Tensor) -> None:
    """Tell all ranks the rows, or token ids, of which something is wanted."""
    collectives.tell(torch.tensor((kind, len(rows), 0, 0, 0)))
    collectives.tell(rows.contiguous())


def hear(collectives: Collectives, hidden_size: int, dtype: torch.dtype) -> tuple[CommandKind, ForwardBatch | Tensor]:
    """Wait for what is told: a step with its inputs, or something else with its rows."""
    header = torch.empty(HEADER, dtype=torch.int64)
    collectives.tell(header)
    number, num_tokens, num_rows, num_seqs, num_blocks = header.tolist()
    kind = CommandKind(number)
    if kind != CommandKind.STEP:
        are_ids = kind == CommandKind.EMBEDDED
        rows = (
            torch.empty(num_tokens, dtype=torch.int64) if are_ids else torch.empty(num_tokens, hidden_size, dtype=dtype)
        )
        collectives.tell(rows)
        return kind, rows
    sizes = (num_tokens, num_tokens, num_tokens, num_rows, 4 * num_seqs, num_blocks)
    told = torch.empty(sum(sizes), dtype=torch.int64)
    collectives.tell(told)
    token_ids, positions, slots, logit_rows, seqs, block_ids = told.split(sizes)
    fields = seqs.view(-1, 4).tolist()
    tables = block_ids.split([field[3] for field in fields])
    slices = [
        SeqSlice(query_start, query_len, kv_len, table)
        for (query_start, query_len, kv_len, _), table in zip(fields, tables, strict=True)
    ]
    return kind, ForwardBatch(token_ids, positions, slots, slices, logit_rows)
