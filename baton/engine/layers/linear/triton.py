"""Apply weights on a GPU by Triton kernels (kernels/linear.py), which dequantize them as they read, and by cuBLAS.

A `GpuLinear` has several paths to the same product. Exact mode uses one, with a larger tile for many rows that sums in
the same order. Otherwise a table (tuning.py), measured by weight form and shape, says which path is fastest for how
many rows.
"""

import math
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from baton.engine.kernels import linear as kernels
from baton.engine.kernels.quantize import RoundedRows, Rounding, round_rows
from baton.engine.layers.linear import tinygemm
from baton.engine.layers.linear.base import LinearKernel
from baton.engine.weights.forms import DenseWeight, IntWeight, Weight
from baton.engine.weights.on_gpu import Stored, levels_of, store

# Rows per tile. A warp group on Hopper multiplies no fewer than 64; more rows use the same instruction and the same
# order of inputs (tests/engine/kernels/test_kernels_compile.py), fewer rows do not.
TILES = (16, 64, 128)
EXACT_TILES = (64, 128)
BLOCK_N, LARGE_BLOCK_N = 64, 128
SEGMENTED_PROGRAMS = 264  # two for each processor of an H100 or H200; with so many programs tiles may be larger
MIN_SEGMENT = 512  # inputs
ROW_BLOCK_N, ROW_BLOCK_K = 8, 512
# Rows of partial sums that a program adds: a tree keeps four, which in 64 rows takes 219 registers a thread.
ADD_ROWS = 16
LIBRARY_PATHS = ("cublas", "int_mm", "scaled_mm", "tinygemm")  # in torch and the libraries that it calls

Path = Callable[..., Tensor]  # x (unrounded or rounded), largest -> y


class GpuLinear(LinearKernel):
    """Apply one weight of any form by the fastest path."""

    name = "triton"
    row_multiple = 1

    def __init__(
        self,
        weight: Weight,
        bias: Tensor | None,
        dtype: torch.dtype,
        exact: bool,
        leaves: int = 1,
        partial: bool = False,
        num_outputs: int = 0,
    ):
        """Prepare a weight that `unfit_on_gpu` accepts, with weight and bias on the device; dtype: of x and y.
        `leaves`: of an exact sum; a faster sum has one. `num_outputs`: outputs of the whole weight, if each rank has
        some of them (0: all are here), so that a rank's sums equal those of one process."""
        self.batch_invariant = exact
        self._tiny: tinygemm.TinyGemm | None = None
        self.stored = stored = store(weight, dtype)
        self.bias = None if bias is None else bias.float()
        self._dense_bias = bias
        self.dtype, self._order, self._outliers = dtype, None, None
        self.dtype_of_y = torch.float32 if partial else dtype
        self._rounding = rounding_of(weight)
        if isinstance(weight, IntWeight):
            self._order = weight.order
            if weight.outliers is not None and weight.outliers.columns.numel():
                self._columns = weight.outliers.columns
                self._outliers = GpuLinear(DenseWeight(weight.outliers.values), None, dtype, exact)
        self.scaled_by_row = self._rounding is not None and self._rounding.of_rows
        self.leaves = leaves if exact else 1
        wanted = round(SEGMENTED_PROGRAMS / -(-(num_outputs or stored.num_out) // BLOCK_N))
        num_segments = max(1, min(wanted, stored.num_in // MIN_SEGMENT))
        multiple = math.lcm(stored.block_k, stored.group if stored.is_grouped else 1)
        self.segment_len = -(-stored.num_in // (num_segments * multiple)) * multiple
        if self.leaves > 1 or (partial and exact):  # also for one leaf of a rank
            self.segment_len = stored.num_in // self.leaves
        self.num_segments = -(-stored.num_in // self.segment_len)
        self.paths = self._exact_paths() if exact else self._fast_paths()
        self._by_rows: list[tuple[float, str]] = self._unmeasured()

    @property
    def num_bytes(self) -> int:
        own = self.stored.num_bytes + (0 if self.bias is None else self.bias.nbytes)
        own += 0 if self._tiny is None else self._tiny.num_bytes
        return own + (0 if self._outliers is None else self._outliers.num_bytes)

    @property
    def key(self) -> str:
        """Return the name under which a measured table is stored."""
        weight, grouped = self.stored, f"g{self.stored.group}" if self.stored.is_grouped else ""
        offsets = "" if weight.offsets is None else "asym"
        rounded = "" if self._rounding is None else "rounded"
        dtype = str(self.dtype).removeprefix("torch.")
        return "-".join(
            filter(None, (weight.kind, grouped, offsets, rounded, dtype, f"{weight.num_out}x{weight.num_in}"))
        )

    @property
    def copying(self) -> frozenset[str]:
        """Return the paths that keep a copy of the weight and are taken only if that pays."""
        return frozenset(("tinygemm",)) & frozenset(self.paths)

    @property
    def num_in(self) -> int:
        return self.stored.num_in

    def move(self, stored: Stored, bias: Tensor | None) -> None:
        """Read the same values from other memory from now on."""
        self.stored, self.bias, self._tiny = stored, bias, None

    def use(self, by_rows: list[tuple[float, str]]) -> None:
        """Use these paths: `by_rows` are (largest number of rows, path) in ascending order, the last number infinite.
        The copy of the weight that a path needs is made now, since after the pool is made there might be no memory
        left."""
        self._by_rows = by_rows
        taken = any(name in self.copying for _, name in by_rows)
        self._tiny = (self._tiny or self._packed()) if taken else None

    @property
    def rounding(self) -> Rounding | None:
        """Return how `of_rounded` wants its rows rounded; None if this weight takes no rounded rows or has its own
        inputs."""
        return None if self.has_own_inputs else self._rounding

    @property
    def has_own_inputs(self) -> bool:
        """Return whether the weight needs unrounded rows first, to reorder their inputs or for its outliers."""
        return self._order is not None or self._outliers is not None

    def __call__(self, x: Tensor, largest: Tensor | None = None) -> Tensor:
        if self._outliers is None:
            return self._path(x.shape[0])(self._ordered(x), largest)
        others = x.index_fill(1, self._columns, 0)  # outliers do not count for the scale of a rounded row
        return self._path(x.shape[0])(self._ordered(others), largest) + self._outliers(x[:, self._columns])

    def of_rounded(self, x: RoundedRows) -> Tensor:
        """Return the product with rows that were rounded as `rounding` says."""
        return self._path(x.values.shape[0])(x, None)

    def _path(self, num_rows: int) -> Path:
        return self.paths[next(name for most, name in self._by_rows if num_rows <= most)]

    def _ordered(self, x: Tensor) -> Tensor:
        x = x if self._order is None else x[:, self._order]
        return x if x.stride(1) == 1 else x.contiguous()

    # ---- paths ----

    def _exact_paths(self) -> dict[str, Path]:
        return {f"tile{tile}": lambda x, largest, tile=tile: self._tiled(x, tile, largest) for tile in EXACT_TILES}

    def _fast_paths(self) -> dict[str, Path]:
        paths: dict[str, Path] = {
            f"tile{tile}": lambda x, largest, tile=tile: self._tiled(x, tile, largest) for tile in TILES
        }
        kind = self.stored.kind
        if kind != "w8a8":
            paths["row"] = self._row
        if kind == "int4" and tinygemm.fits(self.stored.num_out, self.num_in, self.stored.group, self.dtype):
            paths["tinygemm"] = self._tinygemm
        if kind == "dense":
            paths["cublas"] = self._cublas
        aligned = self.stored.num_out % 16 == 0 and self.stored.num_in % 16 == 0
        if kind == "w8a8" and not self.stored.is_grouped and aligned:
            paths["int_mm"] = self._int_mm
        whole = not self.stored.is_grouped and self._rounding is not None
        if kind == "fp8" and whole and aligned and self.dtype == torch.bfloat16:
            paths["scaled_mm"] = self._scaled_mm
        return paths

    def _unmeasured(self) -> list[tuple[float, str]]:
        """Return the table of paths for a weight without measurements."""
        if self.batch_invariant:
            small, large = EXACT_TILES
            tiles_of_rows = -(-SEGMENTED_PROGRAMS // -(-self.stored.num_out // self._columns_of(large)))
            return [(max(small, (tiles_of_rows - 1) * large), f"tile{small}"), (math.inf, f"tile{large}")]
        if "cublas" in self.paths:
            return [(math.inf, "cublas")]
        first = [(1, "row")] if "row" in self.paths else []
        return [*first, (32, "tile16"), (128, "tile64"), (math.inf, "tile128")]

    def fits(self, path: str, num_rows: int) -> bool:
        """Return whether a path takes `num_rows` rows."""
        return {"row": num_rows == 1, "int_mm": num_rows > 16}.get(path, True)

    def _columns_of(self, tile: int) -> int:
        """Return the outputs per tile. With 128, int4 would spill 304 bytes of registers, and e4m3 with e4m3, which has
        a second sum, up to 336; with 64, a tree, which keeps four sums, would spill 72 and 96. fp32 would take 131,072
        bytes of shared memory, more than compute capability 8.6, 8.9 and 12.0 have."""
        if tile < 128 or (self.stored.kind == "dense" and self.dtype == torch.float32):
            return BLOCK_N
        crowded = self.stored.kind == "int4" or self._of_e4m3
        if self.leaves > 1:
            return BLOCK_N // 2 if crowded else BLOCK_N
        return BLOCK_N if crowded else LARGE_BLOCK_N

    @property
    def _of_e4m3(self) -> bool:
        return self._rounding is not None and self.stored.kind == "fp8"

    def _tiled(self, x: Tensor | RoundedRows, tile: int, largest: Tensor | None) -> Tensor:
        stored, constants = self.stored, self.constants(tile)
        x, x_scales = self.activated(x, largest)
        num_rows = x.shape[0]
        y = x.new_empty(num_rows, stored.num_out, dtype=self.dtype_of_y)
        grid = (-(-num_rows // tile), -(-stored.num_out // constants["BLOCK_N"]))
        split = self.num_segments > 1 and grid[0] * grid[1] < SEGMENTED_PROGRAMS
        num_partials = self.num_segments if split else 0
        partials = x.new_empty(num_partials, num_rows, stored.num_out, dtype=torch.float32)
        kernels.multiply[(*grid, max(num_partials, 1))](
            x, stored.values, stored.scales, stored.offsets, self.bias, x_scales, y, partials,
            num_rows, stored.num_out, stored.num_in, x.stride(0), stored.values.stride(0),
            stored.group, stored.num_in // stored.group, self.segment_len, self.num_segments,
            PARTIAL=split, **constants,
        )  # fmt: skip
        if split:
            kernels.add_segments[(-(-num_rows // ADD_ROWS), -(-stored.num_out // BLOCK_N))](
                partials, self.bias, y, num_rows, stored.num_out, self.num_segments, BIAS=self.bias is not None,
                TREE=self.leaves > 1, BLOCK_M=ADD_ROWS, BLOCK_N=BLOCK_N, enable_fp_fusion=not self.batch_invariant,
            )  # fmt: skip
        return y

    def constants(self, tile: int) -> dict[str, int | bool | str]:
        """Return the constants for which a kernel with tiles of so many rows is compiled."""
        stored = self.stored
        # In tiles of 16 rows four warps spill registers on compute capability 9.0: 8 bytes a thread with e4m3, 16 with
        # a tree of int4, 40 with a tree of e4m3 with e4m3.
        crowded = self.leaves > 1 and (stored.kind == "int4" or self._of_e4m3)
        wide = tile > 64 or crowded or (tile == 16 and stored.kind == "fp8")
        return dict(
            KIND=stored.kind, GROUPED=stored.is_grouped, OFFSETS=stored.offsets is not None, X_GROUPED=self._x_grouped,
            BIAS=self.bias is not None, TREE=self.leaves > 1, BLOCK_M=tile, BLOCK_N=self._columns_of(tile),
            BLOCK_K=stored.block_k, num_warps=8 if wide else 4, enable_fp_fusion=not self.batch_invariant,
        )  # fmt: skip

    def _cublas(self, x: Tensor, largest: Tensor | None) -> Tensor:
        return F.linear(x, self.stored.values, self._dense_bias).to(self.dtype_of_y)

    def _row(self, x: Tensor | RoundedRows, largest: Tensor | None) -> Tensor:
        stored = self.stored
        x, x_scales = self.activated(x, largest)
        y = x.new_empty(1, stored.num_out, dtype=self.dtype_of_y)
        kernels.multiply_row[(-(-stored.num_out // ROW_BLOCK_N),)](
            x, stored.values, stored.scales, stored.offsets, self.bias, x_scales, y, stored.num_out, stored.num_in,
            stored.values.stride(0), stored.group, stored.num_in // stored.group,
            KIND=stored.kind, GROUPED=stored.is_grouped, OFFSETS=stored.offsets is not None,
            BIAS=self.bias is not None, X_GROUPED=self._x_grouped, BLOCK_N=ROW_BLOCK_N, BLOCK_K=ROW_BLOCK_K, PACK_K=stored.block_k,
        )  # fmt: skip
        return y

    def _tinygemm(self, x: Tensor, largest: Tensor | None) -> Tensor:
        self._tiny = self._tiny or self._packed()
        y = self._tiny(x).to(self.dtype_of_y)
        return y if self._dense_bias is None else y + self._dense_bias

    def _packed(self) -> tinygemm.TinyGemm:
        stored = self.stored
        levels = levels_of(stored.values, stored.block_k)[:, : stored.num_in]
        return tinygemm.TinyGemm(levels, stored.scales, stored.offsets, stored.group)

    def _int_mm(self, x: Tensor | RoundedRows, largest: Tensor | None) -> Tensor:
        values, x_scales = self.activated(x, largest)
        products = torch._int_mm(values, self.stored.values.t())
        y = torch.empty_like(products, dtype=self.dtype_of_y)
        num_rows, num_out = y.shape
        kernels.scale_products[(-(-num_rows // ADD_ROWS), -(-num_out // BLOCK_N))](
            products, self.stored.scales, x_scales, self.bias, y, num_rows, num_out,
            BIAS=self.bias is not None, BLOCK_M=ADD_ROWS, BLOCK_N=BLOCK_N,
        )  # fmt: skip
        return y

    def _scaled_mm(self, x: Tensor | RoundedRows, largest: Tensor | None) -> Tensor:
        values, x_scales = self.activated(x, largest)
        weight = self.stored
        return torch._scaled_mm(
            values, weight.values.t(), scale_a=x_scales, scale_b=weight.scales.t().contiguous(), bias=self._dense_bias,
            out_dtype=self.dtype,
        ).to(self.dtype_of_y)  # fmt: skip

    @property
    def _x_grouped(self) -> bool:
        return self._rounding is not None and self._rounding.group > 0

    def activated(self, x: Tensor | RoundedRows, largest: Tensor | None) -> tuple[Tensor, Tensor | None]:
        """Return the input as it is multiplied with the weight, and its scales if it is rounded."""
        if not isinstance(x, Tensor):
            return x
        return (x, None) if self._rounding is None else round_rows(x, self._rounding, largest)


def rounding_of(weight: Weight) -> Rounding | None:
    """Return how a weight's form says that its input is rounded."""
    if isinstance(weight, DenseWeight) or weight.activations == "none":
        return None
    if isinstance(weight, IntWeight):
        return Rounding(torch.int8)
    if weight.activations == "static" and weight.input_scale is not None:
        return Rounding(torch.float8_e4m3fn, scale=weight.input_scale)
    groups = weight.activations == "dynamic-block" and weight.block[1] < weight.shape[1]
    return Rounding(torch.float8_e4m3fn, group=weight.block[1] if groups else 0)
