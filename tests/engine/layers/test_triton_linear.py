"""Triton's linear kernels against the dequantized weight in float64: on a GPU, or in Triton's interpreter on a CPU.
Outputs are poisoned: what a kernel does not write shows."""

import json
import math
import os
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")  # read when triton is first imported
pytest.importorskip("triton")

from triton.runtime.errors import OutOfResources

from baton.engine import kernels
from baton.engine.layers.linear import tinygemm, triton, tuning
from baton.engine.layers.linear.gpu import GpuChoice
from baton.engine.layers.linear.triton import GpuLinear
from baton.engine.weights.forms import DenseWeight, pack_int4
from baton.engine.weights.leaves import combined, inputs_of, leaves_of
from baton.engine.weights.on_gpu import levels_of, packed_by, unfit_on_gpu
from tests.support.model_folders.weight_forms import FORMS, dense_weight, int_weight, reference

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
pytestmark = pytest.mark.skipif(
    bool(kernels.unavailable(DEVICE.type)), reason=kernels.unavailable(DEVICE.type) or "there"
)
BF16 = torch.bfloat16
# Relative error of y: bf16 in and out 2^-9; int8 activations about 1/254 of a row's largest value; e4m3 3 bits.
TOLERANCE = {"bf16": 0.004, "int8": 0.012, "e4m3": 0.04}
SHAPE = (70, 256)  # no multiple of a tile


@pytest.fixture(autouse=True)
def poisoned(monkeypatch):
    """Memory that a kernel is to fill is NaN before."""
    empty = torch.Tensor.new_empty

    def poison(self, *size, **options):
        made = empty(self, *size, **options)
        return made.fill_(math.nan) if made.is_floating_point() else made

    monkeypatch.setattr(torch.Tensor, "new_empty", poison)
    monkeypatch.setattr(triton, "MIN_SEGMENT", 64)  # segments also in a small weight
    torch.manual_seed(0)


def on_device(weight):
    from baton.engine.weights.formats.placed import placed

    return placed(weight, DEVICE)


def error(y: torch.Tensor, truth: torch.Tensor) -> float:
    return ((y.double().cpu() - truth).norm() / truth.norm()).item()


def rounding(name: str) -> str:
    if name.startswith("fp8"):
        return "bf16" if name == "fp8-tensor" else "e4m3"
    return "int8" if name.endswith("dynamic") else "bf16"


@pytest.mark.parametrize("name", FORMS)
def test_every_path_of_every_form(name):
    weight, bias = FORMS[name](SHAPE), torch.randn(SHAPE[0]).to(BF16)
    if unfit_on_gpu(weight, BF16):
        pytest.skip(unfit_on_gpu(weight, BF16))
    for exact in (True, False):
        kernel = GpuLinear(on_device(weight), bias.to(DEVICE), BF16, exact)
        for path in kernel.paths:
            if path in ("int_mm", "scaled_mm", "tinygemm") and DEVICE.type == "cpu":
                continue  # a library's, of the GPU
            for num_rows in (1, 19):
                if kernel.fits(path, num_rows) and not (num_rows == 1 and path == "tile128"):
                    x = torch.randn(num_rows, SHAPE[1]).to(BF16)
                    kernel.use([(math.inf, path)])
                    found = error(kernel(x.to(DEVICE)), reference(weight, x, bias))
                    assert found < TOLERANCE[rounding(name)], (path, num_rows)


@pytest.mark.parametrize("exact", [True, False])
def test_outliers_do_not_widen_the_scale_of_their_row(exact):
    """LLM.int8: the other inputs keep their precision on every path. In fp32, where y itself is not rounded."""
    weight, x = int_weight(SHAPE, 8, activations="dynamic", num_outliers=3), torch.randn(19, SHAPE[1])
    x[:, weight.outliers.columns] *= 60
    truth, others = reference(weight, x), reference(weight, x.index_fill(1, weight.outliers.columns, 0))
    kernel = GpuLinear(on_device(weight), None, torch.float32, exact)
    assert kernel.rounding is None  # no kernel before it rounds its rows
    for path in kernel.paths:
        if path != "int_mm" or DEVICE.type == "cuda":
            kernel.use([(math.inf, path)])
            off = (kernel(x.to(DEVICE)).double().cpu() - truth).norm() / others.norm()
            assert off < TOLERANCE["int8"], path


@pytest.mark.parametrize("exact", [True, False])
def test_offsets_of_whole_rows(exact):
    """Which the scale of the row does not meet."""
    weight, x = int_weight(SHAPE, 4, asym=True), torch.randn(3, SHAPE[1]).to(BF16)
    kernel = GpuLinear(on_device(weight), None, BF16, exact)
    for path in ("tile64",) if exact else ("tile64", "row"):
        kernel.use([(math.inf, path)])
        rows = x[:1] if path == "row" else x
        assert error(kernel(rows.to(DEVICE)), reference(weight, rows)) < 0.004, path


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, BF16], ids=str)
def test_dense_weights_equal_the_reference(dtype):
    weight, x = dense_weight((33, 200), dtype), torch.randn(5, 200).to(dtype)
    for path in ("tile16", "row"):
        kernel = GpuLinear(on_device(weight), None, dtype, False)
        kernel.use([(math.inf, path)])
        rows = x[:1] if path == "row" else x
        y = kernel(rows.to(DEVICE))
        assert y.dtype == dtype
        assert error(y, reference(weight, rows)) < {torch.float32: 1e-6, torch.float16: 1e-3}.get(dtype, 0.004)


@pytest.mark.parametrize("name", ["int4-g32-asym", "int8", "int8-dynamic", "fp8-row-dynamic"])
def test_exact_rows_do_not_depend_on_their_batch(name, monkeypatch):
    """One row alone, among few and among many; by partial sums and in one go."""
    kernel = GpuLinear(on_device(FORMS[name](SHAPE)), None, BF16, True)
    assert kernel.num_segments > 1
    x = torch.randn(70, SHAPE[1]).to(BF16).to(DEVICE)
    split = kernel(x)
    assert torch.equal(kernel(x[5:6]), split[5:6]) and torch.equal(kernel(x[3:21]), split[3:21])
    monkeypatch.setattr(triton, "SEGMENTED_PROGRAMS", 0)
    assert torch.equal(kernel(x), split)


@pytest.mark.parametrize("name", ["dense", "int4-g32-asym", "int8-dynamic", "fp8-row-dynamic"])
def test_exact_rows_are_the_same_in_every_tile(name):
    """Many rows take the larger one: in what follows the rows of a chunk of a prompt are those of its decode."""
    weight = dense_weight(SHAPE, BF16) if name == "dense" else FORMS[name](SHAPE)
    kernel = GpuLinear(on_device(weight), None, BF16, True)
    x = torch.randn(70, SHAPE[1]).to(BF16).to(DEVICE)
    small, large = (kernel.paths[path](x, None) for path in ("tile64", "tile128"))
    assert torch.equal(small, large)


@pytest.mark.parametrize("name", ["dense", "int4-g32-asym", "int8-dynamic", "int8-g32", "fp8-row-dynamic"])
def test_ranks_add_up_to_the_bits_of_one_device(name, monkeypatch):
    """Exact sums of 8 leaves; by partial sums and in one go, in both tiles."""
    weight = dense_weight(SHAPE, BF16) if name == "dense" else FORMS[name](SHAPE)
    leaves, bias, x = leaves_of(weight), torch.randn(SHAPE[0], device=DEVICE), torch.randn(9, SHAPE[1]).to(BF16)
    assert leaves == 8
    whole = GpuLinear(on_device(weight), bias, BF16, True, leaves)
    y = whole(x.to(DEVICE))
    assert torch.equal(whole.paths["tile128"](x.to(DEVICE), None), y)
    largest = x.float().abs().amax(1).to(DEVICE) if whole.scaled_by_row else None
    for degree in (2, 8):
        parts = []
        for rank, inputs in enumerate(x.chunk(degree, dim=1)):
            part = GpuLinear(
                on_device(inputs_of(weight, rank, degree)), None, BF16, True, leaves // degree, partial=True
            )
            parts.append(part(inputs.contiguous().to(DEVICE), largest))
        assert parts[0].dtype == torch.float32 and torch.equal((combined(parts) + bias).to(BF16), y), degree
    monkeypatch.setattr(triton, "SEGMENTED_PROGRAMS", 0)
    assert torch.equal(whole(x.to(DEVICE)), y)


def test_the_larger_tile_is_for_rows_that_fill_the_gpu_with_it():
    sizes = {}
    for num_out in (70, 4096, 28672):
        kernel = GpuLinear(on_device(dense_weight((num_out, 64), BF16)), None, BF16, True)
        (sizes[num_out], small), (most, large) = kernel._by_rows
        assert (small, large, most) == ("tile64", "tile128", math.inf)
    assert sizes == {70: 263 * 128, 4096: 8 * 128, 28672: 128}


def test_programs_run_along_the_rows_first(monkeypatch):
    """Axis 0 of a grid is the one that a GPU starts first: all rows read a tile of the weight before the next one."""
    grids = []
    for kernel in ("multiply", "add_segments"):
        launcher = getattr(triton.kernels, kernel)
        spy = type("Spy", (), {"__getitem__": lambda _, grid, of=launcher: grids.append(grid) or of[grid]})()
        monkeypatch.setattr(triton.kernels, kernel, spy)
    linear = GpuLinear(on_device(dense_weight((96, 256), BF16)), None, BF16, True)
    linear(torch.randn(200, 256).to(BF16).to(DEVICE))
    assert [grid[:2] for grid in grids] == [(4, 2), (13, 2)]  # sums are added 16 rows at a time


def test_products_of_libraries(monkeypatch):
    """What _int_mm and _scaled_mm are given, and what becomes of theirs; torch's own for CPUs in their place."""
    if DEVICE.type == "cpu":
        monkeypatch.setattr(torch, "_int_mm", lambda a, b: a.int() @ b.int())

        def scaled_mm(a, b, *, scale_a, scale_b, bias, out_dtype):
            assert a.dtype == b.dtype == torch.float8_e4m3fn and scale_a.shape == (len(a), 1)
            assert scale_a.is_contiguous() and scale_b.is_contiguous() and scale_b.shape == (1, b.shape[1])
            return ((a.double() @ b.double()) * scale_a * scale_b + bias).to(out_dtype)

        monkeypatch.setattr(torch, "_scaled_mm", scaled_mm)
    for path, name in (("int_mm", "int8-dynamic"), ("scaled_mm", "fp8-row-dynamic")):
        weight, x, bias = FORMS[name]((48, 256)), torch.randn(19, 256).to(BF16), torch.randn(48).to(BF16)
        kernel = GpuLinear(on_device(weight), bias.to(DEVICE), BF16, False)
        kernel.use([(math.inf, path)])
        assert error(kernel(x.to(DEVICE)), reference(weight, x, bias)) < TOLERANCE[rounding(name)], path


def test_int4_packing_keeps_every_column():
    q = torch.randint(-8, 8, (3, 96), dtype=torch.int8)
    packed = packed_by(pack_int4(q), 96, 64)
    assert packed.shape == (3, 64)
    low, high = ((half.to(torch.int8) - 8).view(3, 2, 32) for half in (packed & 15, packed >> 4))
    assert torch.equal(torch.stack((low, high), dim=2).flatten(1)[:, :96], q)
    assert not torch.stack((low, high), dim=2).flatten(1)[:, 96:].any()
    assert torch.equal(levels_of(packed, 64)[:, :96].to(torch.int8) - 8, q)


@pytest.fixture
def tinygemm_of_the_cpu(monkeypatch):
    """torch has the same product for CPUs, in another order of the weight: with it what ours is given is computed."""
    if DEVICE.type == "cuda":
        return

    def pack(levels):
        assert levels.dtype == torch.uint8 and levels.is_contiguous()
        assert levels.shape[0] % 8 == 0 and levels.shape[1] % 64 == 0  # of 8 inner tiles of 16 inputs
        whole = torch.stack((levels >> 4, levels & 15), dim=2).flatten(1)
        return torch.ops.aten._convert_weight_to_int4pack_for_cpu(whole.int(), 1)

    def multiply(x, packed, group, scales):
        assert x.dtype == scales.dtype == BF16 and scales.is_contiguous() and group in (32, 64, 128, 256)
        return torch.ops.aten._weight_int4pack_mm_for_cpu(x, packed, group, scales)

    monkeypatch.setattr(tinygemm, "pack", pack)
    monkeypatch.setattr(tinygemm, "multiply", multiply)


@pytest.mark.parametrize("group, asym, order", [(32, False, False), (64, True, False), (128, True, True)])
def test_tinygemm_is_exact_but_for_rounded_scales(group, asym, order, tinygemm_of_the_cpu):
    """Scales are rounded to bf16: 2^-9 of each weight."""
    weight, bias = int_weight((64, 256), 4, group, asym, order), torch.randn(64).to(BF16)
    kernel, x = GpuLinear(on_device(weight), bias.to(DEVICE), BF16, False), torch.randn(5, 256).to(BF16)
    before = kernel.num_bytes
    kernel.use([(math.inf, "tinygemm")])
    assert error(kernel(x.to(DEVICE)), reference(weight, x, bias)) < 0.006
    assert kernel.num_bytes > before
    kernel.use([(math.inf, "tile16")])
    assert kernel.num_bytes == before  # what is not read is not kept


def test_what_tinygemm_does_not_take():
    for out, inner, group, dtype in (
        (64, 256, 16, BF16), (60, 256, 32, BF16), (64, 192, 32, BF16), (64, 256, 32, torch.float16),
    ):  # fmt: skip
        assert not tinygemm.fits(out, inner, group, dtype)
    assert "tinygemm" not in GpuLinear(on_device(int_weight((64, 256), 4, 32)), None, BF16, True).paths


def test_a_copy_of_the_weight_must_pay(tmp_path, tinygemm_of_the_cpu):
    """A tenth faster is not enough for as much memory again."""
    for seconds, taken in ((0.95, "row"), (0.8, "tinygemm")):
        kernel = GpuLinear(on_device(int_weight((64, 256), 4, 32)), None, BF16, False)
        slow = dict.fromkeys(kernel.paths, 2.0) | {"row": 1.0, "tinygemm": seconds}
        calls = []
        kernel.paths = {name: (lambda x, largest, name=name: calls.append(name)) for name in slow}

        def measure(run, slow=slow, calls=calls):
            run()
            return slow[calls[-1]]

        tuning.Table(tmp_path / f"{taken}.json", measure).apply(kernel, DEVICE, BF16)
        kernel(torch.zeros(1, 256, device=DEVICE, dtype=BF16))
        assert calls[-1] == taken


def test_a_library_that_refuses_a_shape_is_left_out(tmp_path, caplog):
    """As cuBLAS did with int8: known from the call alone, and for some numbers of rows."""
    kernel = GpuLinear(on_device(dense_weight((16, 64), BF16)), None, BF16, False)

    def refuse(x, largest):
        if len(x) == 256:
            raise RuntimeError("CUDA error: CUBLAS_STATUS_NOT_SUPPORTED\nwhen calling")

    def rows(x, largest):
        return len(x)

    def measure(run):
        run()
        return 1.0

    kernel.paths = {"cublas": refuse, "tile16": rows, "tile128": rows}
    tuning.Table(tmp_path / "table.json", measure).apply(kernel, DEVICE, BF16)
    assert set(json.loads((tmp_path / "table.json").read_text())[kernel.key].values()) == {"tile16"}
    assert "cublas is left out for dense" in caplog.text and "CUBLAS_STATUS_NOT_SUPPORTED when" in caplog.text
    kernel.paths["tile128"] = refuse
    with pytest.raises(RuntimeError, match="NOT_SUPPORTED"):  # a fault of our own is not passed over
        tuning.Table(tmp_path / "other.json", measure).apply(kernel, DEVICE, BF16)


def test_a_tile_that_is_too_large_is_left_out(tmp_path, caplog):
    """As Triton refuses it where a block's shared memory is less than an A100's: with an error that is no
    RuntimeError."""
    kernel = GpuLinear(on_device(dense_weight((16, 64), BF16)), None, BF16, False)

    def refuse(x, largest):
        raise OutOfResources(131072, 101376, "shared memory")

    kernel.paths = {"tile64": lambda x, largest: x, "tile128": refuse}
    tuning.Table(tmp_path / "table.json", lambda run: run() is None).apply(kernel, DEVICE, BF16)
    assert set(json.loads((tmp_path / "table.json").read_text())[kernel.key].values()) == {"tile64"}
    assert "tile128 is left out for dense" in caplog.text and "Required: 131072" in caplog.text


def test_tiles_of_fp32_fit_any_gpu():
    """Of 128 x 128 they would be for the shared memory of an A100 alone, in exact mode too."""
    for dtype, columns in ((torch.float32, 64), (BF16, 128)):
        kernel = GpuLinear(on_device(dense_weight((256, 64), dtype)), None, dtype, True)
        assert kernel.constants(128)["BLOCK_N"] == columns


def test_the_copy_of_a_weight_is_made_before_the_pool(monkeypatch):
    """Known from a file that it is the fastest, it would else be made by the first step."""
    kernel = GpuLinear(on_device(int_weight((16, 256), 4, 32)), None, BF16, False)
    monkeypatch.setattr(kernel, "_packed", lambda: SimpleNamespace(num_bytes=7000))
    before = kernel.num_bytes
    kernel.use([(math.inf, "tinygemm")])
    assert kernel.num_bytes == before + 7000
    kernel.use([(math.inf, "tile16")])
    assert kernel.num_bytes == before


def test_a_measurement_keeps_no_memory(monkeypatch):
    """What drives other weights out of the cache, 256 MiB, was kept as long as the model: of the pool."""
    event = SimpleNamespace(record=lambda: None, synchronize=lambda: None, elapsed_time=lambda end: 1.0)
    monkeypatch.setattr(torch.cuda, "Event", lambda enable_timing: event)
    monkeypatch.setattr(tuning, "FLUSH_BYTES", 1 << 10)
    measure, runs = tuning.CudaMeasure(torch.device("cpu")), []
    assert measure(lambda: runs.append(1)) == 1e-3 and len(runs) == 1 + tuning.NUM_RUNS
    assert not any(isinstance(value, torch.Tensor) for value in vars(measure).values())


def test_the_device_is_busy_while_a_run_is_launched(monkeypatch):
    """Else the time that Python takes to launch it would count, which is none where graphs run."""
    done = []
    event = SimpleNamespace(record=lambda: done.append("event"), synchronize=lambda: None, elapsed_time=lambda end: 1.0)
    monkeypatch.setattr(torch.cuda, "Event", lambda enable_timing: event)
    monkeypatch.setattr(tuning, "FLUSH_BYTES", 1 << 10)
    monkeypatch.setattr(torch.Tensor, "zero_", lambda tensor: done.append(tensor.nbytes))
    tuning.CudaMeasure(torch.device("cpu"))(lambda: done.append("run"))
    assert done == ["run"] + ([1 << 10] * 4 + ["event", "run", "event"]) * tuning.NUM_RUNS


def test_a_table_is_measured_once_and_read_again(tmp_path):
    calls = []
    slow = {"row": 1.0, "cublas": 3.0, "tile16": 2.0, "tile64": 4.0, "tile128": 5.0}

    def make():
        kernel = GpuLinear(on_device(dense_weight((16, 64), BF16)), None, BF16, False)
        kernel.paths = {name: (lambda x, largest, name=name: calls.append((name, len(x)))) for name in slow}
        return kernel

    def measure(run):
        run()
        return slow[calls[-1][0]]

    path = tmp_path / "cache" / "table.json"
    tuning.Table(path, measure).apply(make(), DEVICE, BF16)
    assert {name for name, _ in calls} == set(slow) and path.exists()
    calls.clear()
    kernel = make()
    tuning.Table(path, lambda run: pytest.fail("measured again")).apply(kernel, DEVICE, BF16)
    for num_rows in (1, 2, 5000):
        kernel(torch.zeros(num_rows, 64, device=DEVICE, dtype=BF16))
    assert calls == [("row", 1), ("tile16", 2), ("tile16", 5000)]
    path.write_text("no table")
    tuning.Table(path, measure).apply(make(), DEVICE, BF16)


def test_weights_that_are_stored_otherwise_are_another_table(monkeypatch):
    """Their tiles are others: what was measured of the old ones says nothing of them."""
    before, read = tuning.table_path("H100"), Path.read_text
    monkeypatch.setattr(Path, "read_text", lambda self: read(self).replace("MAX_BLOCK_K, MIN_BLOCK_K = 128", "= 64"))
    assert tuning.table_path("H100") != before


def test_the_kernel_that_is_chosen_and_why(monkeypatch):
    made = GpuChoice("auto", True, BF16, DEVICE)
    odd = int_weight((16, 48), 4, 16)
    assert made(on_device(dense_weight((16, 64), BF16))).name == "triton" and "fast" in made.reasons
    kernel = made(on_device(odd))
    assert "groups of 16" in made.reasons["triton, as it is stored"]
    x = torch.randn(3, 48).to(BF16)
    assert error(kernel(x.to(DEVICE)), reference(odd, x)) < 0.006  # the weight is rounded to bf16 too
    with pytest.raises(ValueError, match="number of rows"):
        GpuChoice("fast", True, BF16, DEVICE)
    with pytest.raises(ValueError, match="one of auto"):
        GpuChoice("native", True, BF16, DEVICE)
    monkeypatch.setattr(kernels, "unavailable", lambda device: "triton is not installed")
    with pytest.raises(ValueError, match="not installed"):
        GpuChoice("auto", True, BF16, DEVICE)
    kernel = GpuChoice("auto", False, BF16, DEVICE)(DenseWeight(torch.eye(16, dtype=BF16, device=DEVICE)))
    assert kernel.name == "fast"


def test_a_table_that_cannot_be_written_is_no_matter(tmp_path):
    (tmp_path / "file").write_text("")
    kernel = GpuLinear(on_device(dense_weight((16, 64), BF16)), None, BF16, False)
    kernel.paths = {name: lambda x, largest: x.new_full((len(x), 16), 7.0) for name in ("row", "cublas", "tile16")}
    tuning.Table(tmp_path / "file" / "linear.json", lambda run: 0.0).apply(kernel, DEVICE, BF16)
    assert (kernel(torch.zeros(2, 64, device=DEVICE, dtype=BF16)) == 7).all(), "what was measured is used nevertheless"
    assert [path.name for path in tmp_path.iterdir()] == ["file"]
