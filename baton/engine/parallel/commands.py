"""Commands from the first rank to the others: compute a step, or something of rows. Sent as int64 and as rows.

header   [kind, tokens or rows, logit rows, sequences, block ids of all sequences, rows of adapters]
step     token_ids, positions, slots, logit_rows; query_start, query_len, kv_len and number of blocks of each
         sequence, and its state block number, pending tokens and drafts (-1 without a state); the block ids of all;
         begin, end and number of each adapter's rows
layers   a step, then its rows [tokens, hidden_size]
"""

from enum import IntEnum
from typing import NamedTuple

import torch
from torch import Tensor

from baton.engine.core.batch import AdapterRows, ForwardBatch, SeqSlice, StateRows
from baton.engine.parallel.adapters import SentAdapters
from baton.engine.parallel.collectives import Collectives

HEADER = 6
NO_STATE = StateRows(-1)
SEQ = 4 + len(NO_STATE)  # numbers per sequence


class CommandKind(IntEnum):
    """Name what the first rank tells."""

    STEP = 1
    LOGITS = 2  # of rows [R, hidden_size] that a step left
    EMBEDDED = 3  # embedding rows of token ids [R]
    SCORED = 4  # the head's outputs for rows [R, hidden_size]
    LAYERS = 5  # a step, from the rows of the stage before
    SUMMED = 6  # rows [R, hidden_size], several times (sums.py)
    ADAPTER = 7  # its bytes and number: hold it; without bytes: drop it
    # Of ranks on GPUs:
    READ = 8  # a step whose rows are all read
    LAUNCH = 9  # a step whose tokens the first rank draws
    CONTINUE = 10  # a step that continues from the tokens of the last launch
    COPY = 11  # a block of the pool to another


STEPS = (CommandKind.STEP, CommandKind.LAYERS, CommandKind.READ, CommandKind.LAUNCH, CommandKind.CONTINUE)
OF_IDS = (CommandKind.EMBEDDED, CommandKind.COPY)


def packed(batch: ForwardBatch) -> Tensor:
    """Return a step as int64: the header, then its parts. Its adapters are numbers."""
    seqs = [
        number
        for seq in batch.seqs
        for number in (seq.query_start, seq.query_len, seq.kv_len, len(seq.block_ids), *(seq.state or NO_STATE))
    ]
    block_ids = torch.cat([seq.block_ids for seq in batch.seqs])
    adapters = torch.tensor(batch.adapters, dtype=torch.int64).flatten()
    parts = (batch.token_ids, batch.positions, batch.slots, batch.logit_rows, torch.tensor(seqs), block_ids, adapters)
    counts = (len(batch.token_ids), len(batch.logit_rows), len(batch.seqs), len(block_ids), len(batch.adapters))
    return torch.cat((torch.tensor((CommandKind.STEP, *counts)), *parts))


def sizes_of(header: list[int]) -> tuple[int, ...]:
    """Return how many numbers each part of the step with this header has."""
    _, num_tokens, num_rows, num_seqs, num_blocks, num_adapters = header
    return num_tokens, num_tokens, num_tokens, num_rows, SEQ * num_seqs, num_blocks, 3 * num_adapters


def unpacked(header: list[int], payload: Tensor) -> ForwardBatch:
    """Return the step of this header, whose parts are in `payload`."""
    token_ids, positions, slots, logit_rows, seqs, block_ids, adapters = payload.split(sizes_of(header))
    fields = seqs.view(-1, SEQ).tolist()
    tables = block_ids.split([field[3] for field in fields])
    slices = [
        SeqSlice(query_start, query_len, kv_len, table, StateRows(*state) if state[0] >= 0 else None)
        for (query_start, query_len, kv_len, _, *state), table in zip(fields, tables, strict=True)
    ]
    adapted = tuple(AdapterRows(*rows) for rows in adapters.view(-1, 3).tolist())
    return ForwardBatch(token_ids, positions, slots, slices, logit_rows, adapters=adapted)


def broadcast_step(
    collectives: Collectives,
    batch: ForwardBatch,
    adapters: SentAdapters,
    rows: Tensor | None = None,
    kind: CommandKind = CommandKind.STEP,
) -> None:
    """Tell all ranks the inputs of a step and the news of `adapters`; `rows` if the step comes from another stage."""
    for key, data in adapters.news(batch):
        collectives.broadcast(torch.tensor((CommandKind.ADAPTER, len(data), key, 0, 0, 0)))
        collectives.broadcast(data)
    payload = packed(adapters.numbered(batch))
    payload[0] = kind if rows is None else CommandKind.LAYERS
    collectives.broadcast(payload[:HEADER])
    collectives.broadcast(payload[HEADER:])
    if rows is not None:
        collectives.broadcast(rows)


def broadcast_rows(collectives: Collectives, kind: CommandKind, rows: Tensor) -> None:
    """Tell all ranks the rows, token ids or block ids of a command."""
    collectives.broadcast(torch.tensor((kind, len(rows), 0, 0, 0, 0)))
    collectives.broadcast(rows.cpu().contiguous())


class Command(NamedTuple):
    """Hold what a rank has received."""

    kind: CommandKind
    batch: ForwardBatch | None  # if it is a step
    rows: Tensor | None  # of LAYERS and commands that are not steps; ids for EMBEDDED and COPY, bytes for ADAPTER
    key: int = 0  # of ADAPTER


def receive_command(collectives: Collectives, hidden_size: int, dtype: torch.dtype) -> Command:
    """Wait for the first rank's broadcast, and return it. Raises RankLost."""
    header = torch.empty(HEADER, dtype=torch.int64)
    collectives.broadcast(header)
    numbers = header.tolist()
    kind, num_rows, batch = CommandKind(numbers[0]), numbers[1], None
    if kind in STEPS:
        payload = torch.empty(sum(sizes_of(numbers)), dtype=torch.int64)
        collectives.broadcast(payload)
        batch = unpacked(numbers, payload)
        if kind != CommandKind.LAYERS:
            return Command(kind, batch, None)
    if kind == CommandKind.ADAPTER:
        data = torch.empty(num_rows, dtype=torch.uint8)
        collectives.broadcast(data)
        return Command(kind, None, data, key=numbers[2])
    rows = (
        torch.empty(num_rows, dtype=torch.int64) if kind in OF_IDS else torch.empty(num_rows, hidden_size, dtype=dtype)
    )
    collectives.broadcast(rows)
    return Command(kind, batch, rows)
