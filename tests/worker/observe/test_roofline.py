"""A device's limits: measured in bounded time on any device, and read from a file by later starts."""

import pytest
import torch

from baton.engine.core.config import EngineConfig
from baton.worker.observe.roofline import Cache, Roofline, Timer, _product, measure

CPU = torch.device("cpu")


class Clock:
    """Time passes only in measured work."""

    def __init__(self):
        self.seconds = 0.0

    def __call__(self) -> float:
        return self.seconds

    def work(self, seconds: float) -> None:
        self.seconds += seconds


@pytest.mark.parametrize("flops_per_s", [1e8, 1e9, 3e10, 1e11, 1e13], ids="{:g}".format)
def test_products_take_their_time_and_no_more(flops_per_s):
    """Or twice the smallest one, where even that takes longer; a slow device is measured by small products."""
    clock, sizes = Clock(), []

    def product(size: int):
        sizes.append(size)
        return lambda: clock.work(2 * size**3 / flops_per_s)

    best = Timer(CPU, clock).best_flops_per_s(product, 1024, 0.06)
    assert best == pytest.approx(flops_per_s)
    smallest_s = 2 * 256**3 / flops_per_s
    assert clock.seconds <= max(0.06, 2 * smallest_s) * 1.001
    assert sizes == sorted(sizes) and sizes[0] == 256
    assert (sizes[-1] == 1024) == (flops_per_s >= 1e11)


def test_the_best_of_what_was_measured_counts():
    clock, seconds = Clock(), iter([9.0, 0.5, 0.2, 0.4])
    assert Timer(CPU, clock).best_s(lambda: clock.work(next(seconds)), 10.0) == pytest.approx(0.2)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a_product_is_that_of_the_engines_kernel(dtype, tmp_path):
    for linear in ("auto", "dense"):
        y = _product(EngineConfig(tmp_path, linear=linear), CPU, dtype)(32)()
        assert y.dtype == dtype and torch.equal(y, torch.full((32, 32), 32.0, dtype=dtype))


def test_the_roofline_of_this_machine_is_measured(tmp_path):
    found = measure(CPU, _product(EngineConfig(tmp_path), CPU, torch.float32))
    assert found.bytes_per_s > 1e7 and found.flops_per_s > 1e6


def test_later_starts_read_what_the_first_ones_measured(tmp_path):
    """Until some in a row have found nothing better: one may have been measured on a busy machine."""
    measured = []

    def start(key: tuple, *figures: float) -> Roofline:
        def measure() -> Roofline:
            measured.append(figures)
            return Roofline(*figures)

        return Cache(tmp_path / "new", key).best_of(measure)

    assert start(("bf16", 2), 10.0, 100.0) == (10.0, 100.0)
    assert start(("bf16", 2), 8.0, 200.0) == (10.0, 200.0)
    for _ in range(3):
        assert start(("bf16", 2), 1.0, 205.0) == (10.0, 205.0)
    assert len(measured) == 5
    assert start(("bf16", 2), 99.0, 999.0) == (10.0, 205.0) and len(measured) == 5
    assert start(("fp32", 2), 3.0, 30.0) == (3.0, 30.0), "another key is measured by itself"


@pytest.mark.parametrize("text", ["", "{}", "[]", '{"starts_since": 3}', '{"starts_since": 3, "bytes_per_s": null}'])
def test_a_file_that_says_nothing_is_measured_again(tmp_path, text):
    cache = Cache(tmp_path, ("a",))
    cache.best_of(lambda: Roofline(1.0, 2.0))
    (path,) = tmp_path.iterdir()
    path.write_text(text)
    assert cache.best_of(lambda: Roofline(5.0, 6.0)) == (5.0, 6.0)


def test_a_folder_that_cannot_be_written_is_done_without(tmp_path):
    (tmp_path / "file").touch()
    assert Cache(tmp_path / "file", ("a",)).best_of(lambda: Roofline(1.0, 2.0)) == (1.0, 2.0)
