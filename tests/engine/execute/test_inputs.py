"""The parts of a step's inputs lie where kernels expect them, whatever their sizes."""

import itertools
import random

import pytest
import torch

from baton.engine.core.batch import ForwardBatch, SeqSlice
from baton.engine.execute.inputs import ALIGNMENT, StepInputs, StepShape, StepViews

SHAPES = [StepShape(*sizes, True) for sizes in itertools.product((1, 2, 7, 512), (1, 3, 64), (1, 2, 65), (1, 17, 128))]


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_every_part_is_aligned_and_none_overlaps(shape):
    buffer = torch.zeros(shape.num_bytes, dtype=torch.uint8)
    views = StepViews.of(buffer, shape)
    parts = [getattr(views, name) for name in StepViews.__slots__]
    assert [part.numel() for part in parts] == list(shape.sizes)
    assert not [
        part.data_ptr() - buffer.data_ptr() for part in parts if (part.data_ptr() - buffer.data_ptr()) % ALIGNMENT
    ]
    for value, part in enumerate(parts):
        part.fill_(value)
    assert [part.unique().tolist() for part in parts] == [[value] for value in range(len(parts))]


def test_of_the_block_table_only_what_changed_is_copied():
    """Random steps: sequences that grow, go and come, in any order, padded and not. Whatever was there before, a step
    reads the table that it would have if all of it were sent."""
    draw, inputs = random.Random(7), StepInputs(torch.device("cpu"), StepShape(8, 8, 8, 6))
    copied = []
    tables = [torch.randint(0, 99, (draw.randrange(1, 6),)) for _ in range(5)]
    for turn in range(60):
        for index in draw.sample(range(len(tables)), draw.choice((0, 0, 1, 2))):
            tables[index] = torch.cat((tables[index][: draw.randrange(1, 5)], torch.randint(0, 99, (1,))))
        if turn % 7 == 0:
            draw.shuffle(tables)
        chosen = tables[: draw.randrange(1, 6)]
        seqs = [SeqSlice(row, 1, 2 * len(block_ids), block_ids) for row, block_ids in enumerate(chosen)]
        rows = torch.arange(len(seqs))
        batch, before = ForwardBatch(rows, rows, rows, seqs, rows), list(inputs._rows)
        if draw.random() < 0.5:
            found = inputs.send(batch).table
        else:
            shape = StepShape(8, 8, 8, 6)
            inputs.send_padded(batch, shape)
            found = inputs.static(shape, 1, 12).table
        padding = [min(seqs, key=lambda seq: seq.kv_len).block_ids] * (len(found.block_ids) - len(chosen))
        for row, block_ids in zip(found.block_ids, chosen + padding, strict=True):
            assert row[: len(block_ids)].tolist() == block_ids.tolist()
        copied.append(sum(new is not old for new, old in zip(inputs._rows, before, strict=True)))
    assert copied.count(0) > 5 and max(copied) == 8
