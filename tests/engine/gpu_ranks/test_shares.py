"""A rank's part of a product on a GPU sums as the whole does: the segments of its inputs are those of all outputs, and
one leaf is one segment."""

import os

import pytest
import torch

if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")  # read when triton is first imported
pytest.importorskip("triton")

from baton.engine import kernels
from baton.engine.layers.linear.triton import GpuLinear
from baton.engine.parallel.distributed import add_tree
from baton.engine.weights.forms import DenseWeight

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
pytestmark = pytest.mark.skipif(bool(kernels.unavailable(DEVICE)), reason="no Triton here")


def random(*size: int) -> torch.Tensor:
    return torch.randn(*size, generator=torch.Generator().manual_seed(0)).bfloat16().to(DEVICE)


@pytest.mark.parametrize("degree", [2, pytest.param(8, marks=pytest.mark.long)])
def test_outputs_of_a_rank_have_the_bits_of_all(degree):
    """Of 16,896 outputs none are split, of an eighth of them each is, where a rank does not know the others."""
    x, values = random(1, 1024), random(16896 // degree, 1024)
    whole = GpuLinear(DenseWeight(values.repeat(degree, 1)), None, torch.bfloat16, True)
    part = GpuLinear(DenseWeight(values), None, torch.bfloat16, True, num_outputs=16896)
    assert part.num_segments == whole.num_segments == 1
    if degree == 8:
        assert GpuLinear(DenseWeight(values), None, torch.bfloat16, True).num_segments == 2
        assert torch.equal(part(x), whole(x)[:, : len(values)])


@pytest.mark.parametrize("degree", [2, 4, 8])
def test_inputs_of_ranks_add_up_to_the_bits_of_one(degree):
    """Up to one leaf a rank, which is longer than a segment may be."""
    x, values = random(3, 8192), random(64, 8192)
    wanted = GpuLinear(DenseWeight(values), None, torch.bfloat16, True, leaves=8)(x)
    parts = [
        GpuLinear(DenseWeight(own.contiguous()), None, torch.bfloat16, True, 8 // degree, partial=True)(
            rows.contiguous()
        )
        for own, rows in zip(values.chunk(degree, dim=1), x.chunk(degree, dim=1), strict=True)
    ]
    found = add_tree(torch.stack(parts).flatten(1), torch.bfloat16).view(wanted.shape)
    assert torch.equal(found, wanted)
