"""Sums over inputs that ranks share: what 2, 4 or 8 of them add up has the bits of one device, for every form of a
weight."""

import pytest
import torch

from baton.engine.layers.linear import packed, quantized
from baton.engine.layers.linear.dense import DenseLinear
from baton.engine.layers.linear.packed import PackedLinear
from baton.engine.layers.linear.quantized import QuantizedLinear
from baton.engine.weights.leaves import combined, inputs_of, leaves_of
from tests.support.model_folders.weight_forms import FORMS, dense_weight, fp8_weight, int_weight, reference

native = pytest.mark.skipif(bool(packed.unavailable()), reason=packed.unavailable() or "there")
BF16, FP32 = torch.bfloat16, torch.float32
KERNELS = [
    pytest.param(PackedLinear, marks=native, id="native"),
    pytest.param(DenseLinear, id="dense"),
    pytest.param(QuantizedLinear, id="fbgemm"),
]
SHAPE = (70, 1024)


def weight_of(name: str, dtype: torch.dtype):
    return dense_weight(SHAPE, dtype) if name == "dense" else FORMS[name](SHAPE)


@pytest.mark.parametrize("dtype", [FP32, BF16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("name", ["dense", *FORMS])
@pytest.mark.parametrize("kernel", KERNELS)
def test_ranks_add_up_to_the_bits_of_one_device(kernel, name, dtype):
    torch.manual_seed(0)
    weight, bias = weight_of(name, dtype), torch.randn(SHAPE[0]).to(dtype)
    refused = quantized.unfit(weight) if kernel is QuantizedLinear else packed.unfit(weight, dtype)
    if refused and kernel is not DenseLinear:
        pytest.skip(refused)
    order, outliers = getattr(weight, "order", None), getattr(weight, "outliers", None)
    leaves = leaves_of(weight)
    assert leaves == 8
    whole = kernel(weight, bias, dtype, leaves)
    for num_rows in (1, 4, 15):
        x = torch.randn(num_rows, SHAPE[1]).to(dtype)
        x[0, :3] = torch.tensor((0.0, 50.0, -1e-9))
        y, rest = whole(x), x.float()
        if outliers is not None:
            rest = rest.index_fill(1, outliers.columns, 0)  # which the scale of a row is for
        largest = rest.abs().amax(1) if whole.scaled_by_row else None
        for degree in (2, 4, 8):
            columns = (torch.arange(SHAPE[1]) if order is None else order).chunk(degree)
            parts = []
            for rank in range(degree):
                part = kernel(inputs_of(weight, rank, degree), None, dtype, leaves // degree, partial=True)
                parts.append(part(x[:, columns[rank]], largest))
            assert parts[0].dtype == FP32 and y.dtype == dtype
            assert torch.equal((combined(parts) + bias).to(dtype), y), (degree, num_rows)


@native
@pytest.mark.parametrize("name", ["dense", *FORMS])
def test_rows_do_not_depend_on_their_batch(name):
    torch.manual_seed(0)
    weight = weight_of(name, BF16)
    kernel, x = PackedLinear(weight, torch.randn(SHAPE[0]), BF16, 8), torch.randn(300, SHAPE[1]).bfloat16()
    y = kernel(x)
    for rows in (slice(4, 5), slice(3, 9), slice(20, 35), slice(100, 250)):
        assert torch.equal(kernel(x[rows]), y[rows]), rows


@native
@pytest.mark.parametrize("name", ["dense", *FORMS])
def test_as_good_as_one_sum(name):
    torch.manual_seed(0)
    weight, x = weight_of(name, BF16), torch.randn(9, SHAPE[1]).bfloat16()
    truth = reference(weight, x)
    errors = [(PackedLinear(weight, None, BF16, leaves)(x).double() - truth).norm() / truth.norm() for leaves in (1, 8)]
    assert errors[1] < 1.01 * errors[0]


@pytest.mark.parametrize(
    ("weight", "leaves"),
    [
        (dense_weight((1, 128)), 8),
        (dense_weight((1, 96)), 2),  # whole vectors of 16
        (dense_weight((1, 45)), 1),
        (int_weight((1, 256), 4, 32), 8),
        (int_weight((1, 128), 8, 8), 1),
        (int_weight((1, 896), 4, 32), 4),
        (int_weight((1, 4096), 8), 8),
        (int_weight((1, 512), 8), 4),  # activations have a scale for each 128
        (int_weight((1, 512), 8, activations="dynamic"), 8),
        (int_weight((1, 512), 8, 32, order=True, num_outliers=3), 1),
        (fp8_weight((1, 512), (1, 128), "dynamic-block"), 4),
        (fp8_weight((1, 512), (1, 512), "dynamic-block"), 1),
        (fp8_weight((1, 512), (1, 512), "dynamic"), 8),
    ],
)
def test_how_many_leaves(weight, leaves):
    assert leaves_of(weight) == leaves
