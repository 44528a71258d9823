"""The sum of what ranks say: the kernel's bits are those of torch's adds in the order of the tree."""

import os

import pytest
import torch

if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")  # read when triton is first imported
pytest.importorskip("triton")

from baton.engine import kernels
from baton.engine.parallel.add_ranks import BLOCK, add_ranks
from baton.engine.parallel.distributed import add_tree

GPU = pytest.param("cuda", marks=[pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")])
CPU = pytest.param("cpu", marks=pytest.mark.skipif(not kernels.INTERPRETED, reason="Triton's interpreter is off"))
SIZE = 48


@pytest.mark.parametrize("device", [CPU, GPU])
@pytest.mark.parametrize("degree", [2, 4, 8])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_the_kernel_adds_as_torch_does(device, degree, dtype):
    """Behind a multiple of a block and of a row."""
    generator = torch.Generator().manual_seed(degree)
    for count, of in ((BLOCK + 16, torch.float32), (32, torch.bfloat16)):
        parts = torch.randn(degree, count, generator=generator).to(of).to(device)
        for bias in (None, torch.randn(SIZE, generator=generator).to(device)):
            assert torch.equal(add_ranks(parts, dtype, bias, 40), add_tree(parts, dtype, bias, 40))
