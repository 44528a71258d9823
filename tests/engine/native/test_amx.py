"""Linear kernels by the tiles of AMX, emulated: integers have the bits of the tier below, bf16 has the sums of
tiles."""

import os
import subprocess
import sys

import pytest
import torch
from torch import Tensor

from baton.engine.layers.linear.packed import ARGUMENTS, PackedLinear
from baton.engine.native import tier
from tests.support.model_folders.weight_forms import FORMS, dense_weight
from tests.support.native import emulated_tiles
from tests.support.process import ROOT

SUITES = (
    "tests/engine/layers/test_linear_kernels.py",
    "tests/engine/layers/test_leaves.py",
    "tests/engine/layers/test_row_invariance.py",
    "tests/engine/models/test_parity_models.py",
    "tests/engine/speculation/test_heads.py",
)
pytestmark = [
    pytest.mark.skipif(emulated_tiles.COMPILER is None, reason="no C++ compiler"),
    pytest.mark.skipif(
        emulated_tiles.LOWER not in tier.available(), reason=f"this processor has no {emulated_tiles.LOWER}"
    ),
    pytest.mark.timeout(1800),
]
INPUTS = 32  # of a tile of bf16


@pytest.fixture(scope="module")
def library(tmp_path_factory):
    return emulated_tiles.linear_kernels(tmp_path_factory.mktemp("amx"))


def by_tiles(library, kernel: PackedLinear, x: Tensor) -> Tensor:
    apply = library.function("baton_linear", *ARGUMENTS)
    y = x.new_empty(len(x), kernel.panels.num_out)
    apply(kernel.address, x.data_ptr(), None, y.data_ptr(), len(x), 2)
    return y


def test_products_of_amx_are_a_class_of_their_own(library):
    assert library.products == "bf16-tiles"


@pytest.mark.parametrize("shape", [(70, 96), (200, 480)], ids=str)
@pytest.mark.parametrize("name", [name for name in FORMS if name.startswith("int")])
def test_integers_have_the_bits_of_the_tier_below(library, name, shape):
    """From 16 rows on: groups that fill no tile, outputs that fill no panel, rows that fill no tile."""
    torch.manual_seed(0)
    kernel, x = PackedLinear(FORMS[name](shape), torch.randn(shape[0]), torch.float32), torch.randn(53, shape[1])
    for num_rows in (15, 16, 17, 32, 53):
        assert torch.equal(by_tiles(library, kernel, x[:num_rows]), kernel(x[:num_rows])), num_rows


@pytest.mark.parametrize("shape", [(37, 45), (64, 192), (130, 1026)], ids=str)
def test_bf16_is_summed_by_tiles(library, shape):
    """Even and odd inputs of each 32 apart, from zero, then both together, then what was there before."""
    torch.manual_seed(0)
    weight, x = dense_weight(shape, torch.bfloat16), torch.randn(19, shape[1]).bfloat16()
    total = torch.zeros(19, shape[0])
    for rows, columns in zip(x.float().split(INPUTS, 1), weight.values.float().split(INPUTS, 1), strict=True):
        halves = [torch.zeros_like(total), torch.zeros_like(total)]
        for k in range(rows.shape[1]):
            halves[k % 2] += rows[:, k, None] * columns[:, k]
        total += halves[0] + halves[1]
    kernel = PackedLinear(weight, None, torch.bfloat16)
    for num_rows in (1, 16, 19):
        assert torch.equal(by_tiles(library, kernel, x[:num_rows]), total[:num_rows].bfloat16()), num_rows


@pytest.mark.long
@pytest.mark.parametrize("suite", SUITES)
def test_suites_at_the_emulated_tier(suite):
    argv = [sys.executable, "-m", "pytest", "-q", "-x", "-p", emulated_tiles.__name__, "-p", "no:cacheprovider", suite]
    argv += ["-k", "not of_two_ranks"]  # ranks are processes of their own, for which nothing is emulated
    environment = os.environ | {"BATON_ISA": emulated_tiles.AMX.name}
    done = subprocess.run(argv, cwd=ROOT, env=environment, capture_output=True, text=True)
    assert not done.returncode, (done.stdout + done.stderr)[-6000:]
