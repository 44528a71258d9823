"""Merging and padding move values, and never change them."""

from dataclasses import replace

import pytest
import torch

from baton.engine.weights.formats.placed import placed
from baton.engine.weights.forms import DenseWeight, Fp8Weight, IntWeight, Outliers, form_name
from baton.engine.weights.merge import merge, pad
from baton.engine.weights.round import round_asymmetric, round_fp8, round_symmetric


def values(rows: int, columns: int = 128, seed: int = 0) -> torch.Tensor:
    return torch.randn(rows, columns, generator=torch.Generator().manual_seed(seed))


def ordered(weight: torch.Tensor) -> IntWeight:
    order = torch.randperm(weight.shape[1], generator=torch.Generator().manual_seed(9))
    return replace(round_asymmetric(weight[:, order], 4, 32), order=order)


def with_outliers(weight: torch.Tensor) -> IntWeight:
    columns = torch.tensor([3, 50])
    rest = weight.clone()
    rest[:, columns] = 0
    return replace(round_symmetric(rest, 8), outliers=Outliers(columns, weight[:, columns].bfloat16()))


def blocked(weight: torch.Tensor) -> Fp8Weight:
    shape = (-(-weight.shape[0] // 32), -(-weight.shape[1] // 64))
    scales = torch.rand(shape, generator=torch.Generator().manual_seed(4))
    return Fp8Weight(weight.to(torch.float8_e4m3fn), scales, (32, 64), "dynamic-block")


def one_scale(weight: torch.Tensor) -> Fp8Weight:
    return Fp8Weight(weight.to(torch.float8_e4m3fn), torch.tensor([[0.5]]), tuple(weight.shape), "dynamic")


FORMS = {
    "bf16": lambda w: DenseWeight(w.bfloat16()),
    "int8-dynamic": lambda w: round_symmetric(w, 8, activations="dynamic"),
    "int8-g32": lambda w: round_symmetric(w, 8, 32),
    "int4-asym": lambda w: round_asymmetric(w, 4, None),
    "int4-g32-asym": lambda w: round_asymmetric(w, 4, 32),
    "int4-g32-asym-order": ordered,
    "int8-outliers": with_outliers,
    "fp8-row-dynamic": lambda w: round_fp8(w, "dynamic"),
    "fp8-tensor-dynamic": one_scale,
    "fp8-32x64-dynamic-block": blocked,
}


@pytest.mark.parametrize("name", FORMS)
def test_equal_forms_become_one(name):
    parts = [FORMS[name](values(rows, seed=rows)) for rows in (64, 32, 96)]
    assert form_name(parts[0]) == name
    merged = merge(parts)
    assert len(merged) == (3 if "tensor" in name else 1)  # one scale of all cannot be for both
    expected = torch.cat([part.dequantize() for part in parts])
    assert torch.equal(torch.cat([part.dequantize() for part in merged]), expected)


def test_forms_that_differ_stay_apart():
    parts = [FORMS[name](values(64)) for name in FORMS]
    assert merge(parts) == parts
    other_order = replace(parts[5], order=torch.arange(127, -1, -1))
    assert len(merge([parts[5], other_order])) == 2
    assert len(merge([blocked(values(40)), blocked(values(64))])) == 2  # 40 rows end within a block


def test_an_order_is_padded_where_it_is():
    weight = placed(ordered(values(48)), torch.device("meta"))
    assert pad(weight, 0, 64).order.is_meta


@pytest.mark.parametrize("name", FORMS)
@pytest.mark.parametrize(("rows", "columns"), [(0, 0), (24, 0), (0, 64), (0, 20), (24, 64)])
def test_padding_adds_zeros_and_changes_no_weight(name, rows, columns):
    weight = FORMS[name](values(48))
    padded = pad(weight, rows, columns)
    assert padded.shape == (48 + rows, 128 + columns)
    assert torch.equal(padded.dequantize()[:48, :128], weight.dequantize())
    assert not padded.dequantize()[48:, :128].any()
