"""Step times: monotone, bounded by the roofline, and as sure as what they were computed from."""

from pathlib import Path

import pytest

from baton.engine.models.registry import read_spec
from baton.planning.devices import GPUS, Device
from baton.planning.efficiency import Efficiencies, HostCosts, Point, read_efficiencies, shipped
from baton.planning.step_time import Roofs, StepTimes
from baton.planning.virtual_engine import StepPieces

SHIPPED = Path(__file__).resolve().parents[2] / "demo" / "target"
SHAPES = Path(__file__).resolve().parents[2] / "baton" / "planning" / "shapes"
NO_HOST = HostCosts(0, 0, 0, 0, 0, 0)
PERFECT = [Point(kind, "*", 1e6, 1, 1.0) for kind in ("linear", "head", "decode_attention", "prefill_attention")]


def times(name="llama-3.1-8b", device="H100", form="none") -> StepTimes:
    return StepTimes(read_spec(SHAPES / name), GPUS[device], Efficiencies("", NO_HOST, PERFECT, True), form, "bf16")


def test_a_lone_token_reads_every_weight_once():
    step = times()
    assert step.decode_s(1, 1) == pytest.approx(15.01e9 / 3.35e12, rel=0.01)


def test_fp32_reads_twice_as_much_and_multiplies_at_its_own_rate():
    wide, usual = times(form="fp32"), times()
    assert wide.decode_s(1, 1) == pytest.approx(2 * usual.decode_s(1, 1), rel=0.01)
    prompt = StepPieces(((2048, 2048),), 1)
    assert wide.bound(prompt).linear_s == pytest.approx(usual.bound(prompt).linear_s * 989 / 67, rel=0.01)


@pytest.mark.parametrize("form, slower", [("int4-g32", 989 / 67), ("int8", 1)])
def test_rounded_weights_are_multiplied_in_the_dtype_of_the_workers_where_rows_are_not_rounded(form, slower):
    prompt, parts = StepPieces(((2048, 2048),), 1), (Efficiencies("", NO_HOST, PERFECT, True), form, "bf16")
    spec = read_spec(SHAPES / "llama-3.1-8b")
    usual, wide, half = (StepTimes(spec, GPUS["H100"], *parts, dtype=dtype) for dtype in ("bf16", "fp32", "fp16"))
    assert half.bound(prompt).linear_s == usual.bound(prompt).linear_s
    assert wide.bound(prompt).linear_s == pytest.approx(usual.bound(prompt).linear_s * slower, rel=0.01)


def test_a_long_prompt_waits_for_products():
    step = times()
    bound = step.bound(StepPieces(((2048, 2048),), 1))
    assert not bound.is_memory_bound and bound.linear_s == pytest.approx(2 * 6.98e9 * 2048 / 989e12, rel=0.01)
    assert step.bound(StepPieces(((1, 2048),), 1)).is_memory_bound


def test_more_work_never_takes_less():
    step = times()
    ladder = [step.decode_s(num, 1000) for num in (1, 2, 8, 32, 128, 256)]
    assert ladder == sorted(ladder)
    assert step.decode_s(8, 8000) > step.decode_s(8, 1000)
    assert step.prefill_s(4000, 2048) > step.prefill_s(2000, 2048)


@pytest.mark.parametrize("other", ["H200", "B200"])
def test_a_better_device_is_never_slower(other):
    assert times(device=other).decode_s(32, 2000) <= times().decode_s(32, 2000)


def test_one_token_meets_few_experts():
    roofs = Roofs(read_spec(SHAPES / "qwen3-30b-a3b"), GPUS["H100"], "none", "bf16")
    alone, many = roofs.linear_s(1)[0], roofs.linear_s(64)[0]
    assert many > 5 * alone
    assert many == roofs.linear_s(17)[0], "16 tokens of 8 experts each may choose all 128"


def test_windows_bound_what_a_layer_sees():
    roofs = times().roofs
    assert roofs.seen(5000) == 5000
    roofs._windows = [1000] * 16
    assert roofs.seen(5000) == pytest.approx((16 * 1000 + 16 * 5000) / 32)


def cpu_times(cache_bytes: int) -> StepTimes:
    """A CPU whose cache is ten times as fast as its memory; kernels reach half of either."""
    points = [
        Point(kind, "*", 1e6, 1, 0.5, is_cached)
        for kind in ("linear", "head", "decode_attention", "prefill_attention")
        for is_cached in (False, True)
    ]
    device = Device("test", "cpu", 8 << 30, 1e10, {"bf16": 1e15}, 1e9, 2, 1, cache_bytes, 1e11)
    return StepTimes(read_spec(SHIPPED), device, Efficiencies("", NO_HOST, points, True), "none", "bf16")


def test_what_fits_into_the_cache_is_read_at_its_rate():
    """All that a step reads, KV too: by turns a little too much pushes everything out."""
    step, small = cpu_times(32 << 20), cpu_times(1 << 20)
    assert small.decode_s(1, 100) == pytest.approx(10 * step.decode_s(1, 100), rel=0.01)
    assert step.decode_s(4, 2000) == small.decode_s(4, 2000)


# ---- efficiencies ----


def test_between_points_the_logarithm_counts():
    points = [
        Point("linear", "none", size, rows, value)
        for size, rows, value in ((1e6, 1, 1.0), (1e6, 100, 0.25), (1e8, 1, 0.5))
    ]
    known = Efficiencies("", NO_HOST, points, True)
    assert known.of("linear", "none", 1e6, 10) == pytest.approx(0.5)
    assert known.confidence == "interpolated"
    assert known.of("linear", "none", 1e7, 1) == pytest.approx(0.5**0.5)
    assert known.of("linear", "none", 1e9, 1) == 0.5
    assert known.confidence == "extrapolated"


def test_at_a_point_it_is_measured():
    known = Efficiencies("", NO_HOST, [Point("linear", "none", 1e6, 4, 0.7)], True)
    assert known.of("linear", "none", 1e6, 4) == 0.7 and known.confidence == "measured"


def test_what_was_assumed_is_never_called_measured():
    known = shipped("cuda")
    known.of("linear", "none", 1e6, 1)
    assert known.confidence == "extrapolated"


def test_the_shipped_file_of_cpus_has_every_class():
    known = shipped("cpu")
    assert {point.kind for point in known.points} == {"linear", "head", "decode_attention", "prefill_attention"}
    assert {"none", "int8", "int4-g32"} <= known.forms("linear")
    assert all(0.01 < point.efficiency < 10 for point in known.points)


def test_a_file_that_is_none_is_named(tmp_path):
    path = tmp_path / "x.json"
    path.write_text('{"device": "x"}')
    with pytest.raises(ValueError, match=r"x\.json: not a file of kernel efficiencies"):
        read_efficiencies(path)
