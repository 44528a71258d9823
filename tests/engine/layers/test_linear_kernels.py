"""Kernels against the dequantized weight, exact sums against integers, and what is chosen where."""

import os
import subprocess
import sys

import pytest
import torch

from baton.engine.layers.linear import JoinedLinear, choose, packed, quantized
from baton.engine.layers.linear.packed import PackedLinear
from baton.engine.layers.linear.panels import pack
from baton.engine.layers.linear.quantized import QuantizedLinear
from baton.engine.weights.forms import IntWeight
from tests.support.model_folders.weight_forms import FORMS, dense_weight, int_weight, reference

native = pytest.mark.skipif(bool(packed.unavailable()), reason=packed.unavailable() or "there")
fbgemm = pytest.mark.skipif(
    quantized.ENGINE not in torch.backends.quantized.supported_engines, reason="this torch was built without it"
)
BF16, FP32 = torch.bfloat16, torch.float32
# Relative error of y, by what the activations are rounded to: bf16 output 2^-9; int8 about 1/254 of the largest value
# of a row; e4m3 3 bits of mantissa.
TOLERANCE = {"bf16": 0.004, "int8": 0.012, "e4m3": 0.04}


def error(y: torch.Tensor, truth: torch.Tensor) -> float:
    return ((y.double() - truth).norm() / truth.norm()).item()


def rounding(name: str) -> str:
    if name.startswith("fp8"):
        return "bf16" if name == "fp8-tensor" else "e4m3"
    return "int8"


@native
@pytest.mark.parametrize("dtype", [FP32, BF16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("shape", [(37, 64), (64, 96), (200, 480)], ids=str)
@pytest.mark.parametrize("name", FORMS)
def test_against_the_dequantized_weight(name, shape, dtype):
    torch.manual_seed(0)
    weight, bias, x = FORMS[name](shape), torch.randn(shape[0]).to(dtype), torch.randn(15, shape[1]).to(dtype)
    if packed.unfit(weight, dtype):
        pytest.skip(packed.unfit(weight, dtype))
    y = PackedLinear(weight, bias, dtype)(x)
    assert y.dtype == dtype and y.shape == (15, shape[0])
    assert error(y, reference(weight, x, bias)) < TOLERANCE[rounding(name)]


@native
@pytest.mark.parametrize("shape", [(37, 45), (64, 192), (130, 1026), (70, 2500)], ids=str)
@pytest.mark.parametrize(("dtype", "tolerance"), [(FP32, 1e-6), (BF16, 0.004)], ids=["fp32", "bf16"])
def test_dense_weights_equal_the_reference(shape, dtype, tolerance):
    torch.manual_seed(0)
    weight, bias, x = dense_weight(shape, dtype), torch.randn(shape[0]).to(dtype), torch.randn(9, shape[1]).to(dtype)
    assert error(PackedLinear(weight, bias, dtype)(x), reference(weight, x, bias)) < tolerance


@native
@pytest.mark.parametrize("x", [torch.zeros(3, 64), torch.zeros(3, 32, dtype=BF16)], ids=["dtype", "width"])
def test_rows_of_another_dtype_or_width_are_refused(x):
    """They were read as they lie, and beyond their end."""
    kernel = PackedLinear(dense_weight((64, 64), BF16), None, BF16)
    with pytest.raises(AssertionError):
        kernel(x)


EXACT = [
    pytest.param(PackedLinear, 8, marks=native, id="native-8"),
    pytest.param(PackedLinear, 4, marks=native, id="native-4"),
    pytest.param(QuantizedLinear, 8, marks=fbgemm, id="fbgemm-8"),
]


@pytest.mark.parametrize(("kernel", "bits"), EXACT)
@pytest.mark.parametrize("shape", [(37, 48), (64, 8192), (100, 1000)], ids=str)
def test_dynamic_sums_are_exact(shape, kernel, bits):
    """int8 times int8 per row: every bit is what integer arithmetic and two fp32 products say."""
    torch.manual_seed(0)
    weight, bias = int_weight(shape, bits, activations="dynamic"), torch.randn(shape[0])
    x = torch.randn(13, shape[1]) * 3
    largest = x.abs().amax(1, keepdim=True)
    rows = torch.round(x * (127 / largest)).long()
    sums = (rows @ weight.integers().long().t()).float()
    truth = sums * (largest / 127) * weight.scales.t() + bias
    assert torch.equal(kernel(weight, bias, FP32)(x), truth)


@native
def test_group_sums_are_exact():
    """Weight-only with groups: activations rounded to int8 by group; fp32 adds the groups in order."""
    torch.manual_seed(0)
    weight, x = int_weight((50, 256), 4, 32), torch.randn(7, 256)
    groups = x.unflatten(1, (-1, 32))
    largest = groups.abs().amax(2, keepdim=True)
    rows = torch.round(groups * (127 / largest))
    dequantized = (rows * (largest / 127)).flatten(1)
    truth = reference(weight, dequantized)
    assert error(PackedLinear(weight, None, FP32)(x), truth) < 1e-6


@fbgemm
def test_sums_that_sixteen_bits_do_not_hold():
    """The largest values side by side: products of whole bytes would be cut off in pairs below VNNI."""
    values = torch.full((3, 4096), -128, dtype=torch.int8)
    values[1:] = 127
    weight, x = IntWeight(8, values, torch.ones(3, 1), 4096, activations="dynamic"), torch.full((2, 4096), 127.0)
    x[1] = -127
    row = torch.tensor([-128.0, 127, 127]) * 127 * 4096
    assert torch.equal(QuantizedLinear(weight, None, FP32)(x), torch.stack([row, -row]))


@fbgemm
def test_torch_says_nothing_of_its_plans():
    """A start without kernels has one warning, which says what is lost."""
    code = "import torch; from baton.engine.layers.linear.quantized import _packed; _packed(torch.ones(4, 4).char())"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stderr == ""


ROW_KERNELS = [
    *(pytest.param(PackedLinear, name, marks=native) for name in ("int8-dynamic", "int4-g32", "fp8-row-dynamic")),
    pytest.param(QuantizedLinear, "int8-dynamic", marks=fbgemm),
]


@pytest.mark.parametrize(("kernel", "name"), ROW_KERNELS)
def test_rows_of_zeros_and_of_nan(kernel, name):
    """A row of zeros gives the bias; a NaN shows in its own row, whole, and in no other."""
    torch.manual_seed(0)
    weight, bias, x = FORMS[name]((70, 96)), torch.randn(70).bfloat16(), torch.randn(5, 96).bfloat16()
    kernel = kernel(weight, bias, BF16)
    clean = kernel(x)
    x[1], x[3, 17] = 0, float("nan")
    y = kernel(x)
    assert torch.equal(y[1], bias)
    assert y[3].isnan().all()
    assert torch.equal(y[[0, 2, 4]], clean[[0, 2, 4]])


@native
def test_outliers_do_not_widen_the_scale_of_their_row():
    """LLM.int8: a column a thousand times larger stays in floating point, and the others keep their precision."""
    torch.manual_seed(0)
    weight, x = int_weight((64, 256), 8, activations="dynamic", num_outliers=3), torch.randn(4, 256)
    x[:, weight.outliers.columns] *= 1000
    y, truth = PackedLinear(weight, None, FP32)(x), reference(weight, x)
    plain = x.clone()
    plain[:, weight.outliers.columns] = 0
    assert (y.double() - truth).norm() < 0.012 * reference(weight, plain).norm()


@native
def test_bytes_are_the_stored_ones():
    """Two bytes a scale where they hold it exactly; nothing is expanded."""
    shape = (256, 1024)
    assert PackedLinear(int_weight(shape, 4, 32), None, BF16).num_bytes == 256 * 1024 // 2 + 256 * 32 * 2
    assert PackedLinear(int_weight(shape, 8, activations="dynamic"), None, BF16).num_bytes == 256 * 1024 + 256 * 2
    assert PackedLinear(dense_weight(shape, BF16), None, BF16).num_bytes == 256 * 1024 * 2


@pytest.mark.parametrize(
    "kernel", [pytest.param(PackedLinear, marks=native), pytest.param(QuantizedLinear, marks=fbgemm)]
)
def test_a_kernel_takes_no_rows(kernel):
    kernel = kernel(int_weight((64, 64), 8, activations="dynamic"), None, BF16)
    assert kernel(torch.empty(0, 64, dtype=BF16)).shape == (0, 64)


def test_joined_kernels_concatenate():
    torch.manual_seed(0)
    parts = [int_weight((40, 64), 8, activations="dynamic"), int_weight((24, 64), 4, 32)]
    make, _ = choose("auto", True, BF16)
    kernels, x = [make(part, None) for part in parts], torch.randn(3, 64).bfloat16()
    joined = JoinedLinear(kernels)
    assert torch.equal(joined(x), torch.cat([kernel(x) for kernel in kernels], dim=1))
    assert joined.batch_invariant and joined.num_bytes == sum(kernel.num_bytes for kernel in kernels)


# ---- choice ----


@native
def test_auto_takes_native_and_says_why_not_others():
    make, reasons = choose("auto", True, BF16)
    assert make(int_weight((64, 64), 4, 32), None).name == "native"
    assert set(reasons) == {"fbgemm", "dense", "fast"} and "native" in reasons["dense"]


@native
def test_what_native_refuses_goes_to_dense_with_a_reason():
    make, reasons = choose("auto", True, torch.float16)
    assert make(dense_weight((64, 64)), None).name == "dense"
    assert "float16" in reasons["native"]
    with pytest.raises(ValueError, match="native"):
        choose("native", True, torch.float16)[0](dense_weight((64, 64)), None)


@pytest.mark.parametrize("name", FORMS)
def test_without_the_library_int8_rows_stay_and_other_forms_are_expanded(name, monkeypatch):
    monkeypatch.setattr(packed, "unavailable", lambda: "BATON_NATIVE=off")
    torch.manual_seed(0)
    make, reasons = choose("auto", True, BF16)
    weight, x = FORMS[name]((64, 96)), torch.randn(5, 96).bfloat16()
    kernel = make(weight, None)
    stays = name == "int8-dynamic" and not quantized.unfit(weight)
    assert kernel.name == ("fbgemm" if stays else "dense") and reasons["native"] == "BATON_NATIVE=off"
    assert stays or reasons["fbgemm"] == quantized.unfit(weight) != ""
    assert error(kernel(x), reference(weight, x)) < (0.04 if rounding(name) == "e4m3" else 0.01)
    assert choose("fbgemm", True, BF16)[0](weight, None).name == kernel.name
    with pytest.raises(ValueError, match="BATON_NATIVE=off"):
        choose("native", True, BF16)


def test_native_off_in_the_environment():
    code = "from baton.engine.layers.linear import packed; print(packed.unavailable())"
    off = os.environ | {"BATON_NATIVE": "off"}
    done = subprocess.run([sys.executable, "-c", code], env=off, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "BATON_NATIVE=off"


def test_packing_needs_no_library():
    """Panels of 64 outputs, four inputs of an output side by side."""
    weight = int_weight((65, 32), 8)
    values = pack(weight, FP32).values.view(torch.uint8).view(2, 8, 64, 4)
    assert torch.equal(values[0, 3, 10], (weight.values[10, 12:16].view(torch.uint8) ^ 128))
    assert torch.equal(values[1, 0, 0], (weight.values[64, :4].view(torch.uint8) ^ 128))
