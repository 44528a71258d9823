"""The parts of a step's inputs lie where kernels expect them, whatever their sizes."""

import itertools

import pytest
import torch

from baton.engine.execute.inputs import ALIGNMENT, StepShape, StepViews

SHAPES = [StepShape(*sizes) for sizes in itertools.product((1, 2, 7, 512), (1, 3, 64), (1, 2, 65), (1, 17, 128))]


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
