"""Each calibrated rounding against plain rounding, and against small references written another way."""

import pytest
import torch

from baton.engine.weights.round import round_symmetric
from baton.quantization.core.block import GATE, MLP_NORM, STAGES, UP, Stage
from baton.quantization.core.grid import dequantize, fit
from baton.quantization.methods import awq, gptq, outliers, smoothquant
from tests.support.model_folders.models_hard_to_quantize import blocks, correlated, make_family

FP32 = torch.float32


def weight_and_inputs(seed: int = 0, out: int = 48, size: int = 64):
    torch.manual_seed(seed)
    return torch.randn(out, size), correlated(512, size, seed)


def loss(difference: torch.Tensor, x: torch.Tensor) -> float:
    return (x @ difference.T).square().sum().item()


@pytest.mark.parametrize("bits", (4, 8))
@pytest.mark.parametrize("group", (32, 64))
def test_a_plain_grid_is_rounding_to_nearest(bits, group):
    weight, _ = weight_and_inputs()
    grid = fit(weight, bits, group, FP32)
    torch.testing.assert_close(dequantize(grid, weight), round_symmetric(weight, bits, group).dequantize())
    assert torch.equal(grid.form(grid.round(weight)).dequantize(), dequantize(grid, weight))


def test_scales_are_what_the_file_stores():
    weight, x = weight_and_inputs()
    grid = fit(weight, 4, 32, torch.bfloat16, x.square().mean(dim=0))
    assert torch.equal(grid.scales, grid.scales.bfloat16().float())
    assert torch.equal(grid.form(grid.round(weight)).scales, grid.scales)


def test_zero_rows_stay_zero():
    weight = torch.zeros(4, 64)
    assert (dequantize(fit(weight, 4, 32, FP32, torch.ones(64)), weight) == 0).all()


def test_clipping_lowers_the_weighted_error():
    weight, x = weight_and_inputs()
    weight[:, 5] = 9  # worth clipping where it is hardly read
    x[:, 5] *= 0.01
    importance = x.square().mean(dim=0)

    def error(grid):
        return ((dequantize(grid, weight) - weight).square() * importance).sum()

    assert error(fit(weight, 4, 64, FP32, importance)) < 0.5 * error(fit(weight, 4, 64, FP32))


def optimal_brain_rounding(weight: torch.Tensor, hessian: torch.Tensor, grid, order: list[int]) -> torch.Tensor:
    """GPTQ as its paper derives it, without the Cholesky factor: after each input the inverse Hessian of the inputs
    that are left is computed again."""
    rest, rounded = weight.double().clone(), torch.empty_like(weight)
    left = list(order)
    for column in order:
        inverse = torch.linalg.inv(hessian[left][:, left])
        scales = grid.scales[:, column // grid.group]
        rounded[:, column] = torch.round(rest[:, column].float() / scales).clamp(-8, 7)
        error = (rest[:, column] - rounded[:, column] * scales) / inverse[0, 0]
        rest[:, left] -= torch.outer(error, inverse[0])
        left = left[1:]
    return rounded


def test_gptq_is_optimal_brain_rounding():
    weight, x = weight_and_inputs(out=6, size=32)
    moment = x.T @ x / len(x)
    grid = fit(weight, 4, 32, FP32)
    damped = moment.double() + gptq.DAMPING * moment.diagonal().double().mean() * torch.eye(32, dtype=torch.float64)
    order = torch.argsort(moment.diagonal(), descending=True).tolist()
    expected = optimal_brain_rounding(weight, damped, grid, order)
    found = gptq.round_compensated(weight, moment, grid)
    assert (found == expected).float().mean() > 0.97  # ties of fp32 against fp64 aside


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("size", (64, 320))  # within one run of columns, and across several
def test_gptq_beats_plain_rounding_on_correlated_inputs(seed, size):
    weight, x = weight_and_inputs(seed, size=size)
    grid = fit(weight, 4, 32, FP32)
    compensated = grid.form(gptq.round_compensated(weight, x.T @ x / len(x), grid)).dequantize()
    assert loss(compensated - weight, x) < 0.5 * loss(dequantize(grid, weight) - weight, x)


def test_gptq_with_inputs_that_are_always_zero():
    weight, x = weight_and_inputs()
    x[:, 3:9] = 0
    grid = fit(weight, 4, 32, FP32)
    q = gptq.round_compensated(weight, x.T @ x / len(x), grid)
    assert torch.isfinite(q).all() and q.min() >= -8 and q.max() <= 7


@pytest.fixture
def block(tmp_path):
    """Its gate and up read a few large channels."""
    _, _, (block, *_) = blocks(make_family(tmp_path, "llama2"))
    return block


def stage_of(block, seed: int = 0) -> Stage:
    return Stage(STAGES[2], list(correlated(512, block.spec.hidden_size, seed).split(128)))


def test_awq_beats_plain_rounding(block):
    stage = stage_of(block)
    x = torch.cat(stage.inputs).clone()
    before = {name: block.weights[name].clone() for name in (GATE, UP)}
    norm = block.norms[MLP_NORM].clone()
    awq.scale_inputs(block, stage, 4, 32, FP32)
    factors = norm / block.norms[MLP_NORM]
    torch.testing.assert_close(torch.cat(stage.inputs), x / factors)
    for name, weight in before.items():
        scaled = block.weights[name]
        torch.testing.assert_close(scaled, weight * factors)
        rounded = dequantize(fit(scaled, 4, 32, FP32), scaled) / factors
        plain = dequantize(fit(weight, 4, 32, FP32), weight)
        assert loss(rounded - weight, x) < 0.9 * loss(plain - weight, x)


def test_output_error_is_the_mean_squared_difference():
    weight, x = weight_and_inputs()
    difference = torch.randn_like(weight) / 100
    assert awq.output_error(difference, x.T @ x / len(x)) == pytest.approx(loss(difference, x) / len(x), rel=1e-4)


def test_smoothquant_beats_plain_int8(block):
    def error(weight, x, exact):
        rounded = dequantize(fit(weight, 8, weight.shape[1], FP32), weight)
        return (smoothquant.round_rows(x) @ rounded.T - exact).square().sum().item()

    stage = stage_of(block)
    x, weight = torch.cat(stage.inputs).clone(), block.weights[UP].clone()
    exact = x @ weight.T
    smoothquant.smooth_inputs(block, stage, FP32)
    assert error(block.weights[UP], torch.cat(stage.inputs), exact) < 0.5 * error(weight, x, exact)


def test_round_rows_has_one_scale_a_row():
    x = torch.randn(5, 40)
    x[2] = 0
    rounded = smoothquant.round_rows(x)
    steps = rounded * 127 / x.abs().amax(dim=1, keepdim=True).clamp(min=1e-9)
    torch.testing.assert_close(steps, steps.round(), atol=1e-3, rtol=0)
    assert ((rounded - x).abs() <= x.abs().amax(dim=1, keepdim=True) / 254 + 1e-6).all()


def test_outliers_are_the_large_columns_in_order():
    x = torch.randn(300, 64)
    x[7, 50] = 90
    x[8, 3] = -80
    assert outliers.find(Stage(STAGES[0], [x[:100], x[100:]])).tolist() == [3, 50]
    assert outliers.find(Stage(STAGES[0], [torch.randn(300, 64).clamp(-3, 3)])).tolist() == []
    rest, kept = outliers.split(torch.ones(4, 64), torch.tensor([3, 50]))
    assert rest.sum() == 4 * 62 and kept.values.dtype == torch.bfloat16 and kept.values.shape == (4, 2)


def test_too_many_outliers_are_the_largest_of_them():
    x = torch.zeros(1000, 64)
    x[0, :10] = torch.arange(100, 110).float()  # one token in a thousand
    assert outliers.find(Stage(STAGES[0], [x])).tolist() == [8, 9]
