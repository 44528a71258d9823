"""Choose the fastest path of a GPU kernel for each number of rows: measured once per device, software and weight shape,
and kept in a file."""

import hashlib
import json
import logging
import math
import os
import statistics
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import torch
from triton.runtime.errors import OutOfResources

from baton import system
from baton.engine.layers.linear.triton import LIBRARY_PATHS, GpuLinear
from baton.lines import one_line

ROWS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 2048)
NUM_RUNS = 7
FLUSH_BYTES = 256 << 20  # beyond the L2 of any GPU: in a model other weights have passed since
# Before each run, while Python launches it: what it takes for that would else count, which a graph does not have. By
# bytes an H200 writes these once in 56 us.
NUM_FLUSHES = 4
COPY_MARGIN = 1.1  # by which a path that keeps a copy of the weight must be the faster one
# Below baton/engine: another kernel is another table.
SOURCES = (
    "layers/linear/triton.py", "layers/linear/tinygemm.py", "kernels/linear.py", "kernels/quantize.py",
    "weights/on_gpu.py",
)  # fmt: skip

logger = logging.getLogger(__name__)

Measure = Callable[[Callable[[], object]], float]  # seconds of one run


class Table:
    """Paths by weight and rows, of one device and software. A file that cannot be written is done without."""

    def __init__(self, path: Path, measure: Measure):
        self._path, self._measure = path, measure
        try:
            self._best: dict[str, dict[str, str]] = json.loads(path.read_text())
        except (OSError, ValueError):
            self._best = {}

    @torch.inference_mode()
    def apply(self, kernel: GpuLinear, device: torch.device, dtype: torch.dtype) -> None:
        """Has the kernel use what is fastest; measures what the file does not know."""
        found = self._best.get(kernel.key, {})
        if not all(found.get(str(rows)) in kernel.paths for rows in ROWS):
            x = torch.randn(ROWS[-1], kernel.num_in, device=device).to(dtype)
            found = self._fastest(kernel, x)
            self._best[kernel.key] = found
            self._save()
        limits = [float(rows) for rows in ROWS[:-1]] + [math.inf]
        kernel.use([(limit, found[str(rows)]) for limit, rows in zip(limits, ROWS, strict=True)])

    def _fastest(self, kernel: GpuLinear, x: torch.Tensor) -> dict[str, str]:
        """Return the fastest path for each of ROWS. A path of a library that raises for any of them is left out, and so
        is a tile that is larger than the device's shared memory."""
        seconds: dict[int, dict[str, float]] = {rows: {} for rows in ROWS}
        for name, path in list(kernel.paths.items()):
            try:
                for rows in (rows for rows in ROWS if kernel.fits(name, rows)):
                    seconds[rows][name] = self._measure(lambda path=path, rows=rows: path(x[:rows], None))
            except (RuntimeError, OutOfResources) as error:
                if name not in LIBRARY_PATHS and not isinstance(error, OutOfResources):
                    raise
                logger.warning("%s is left out for %s: %s", name, kernel.key, one_line(error))
                for each in seconds.values():
                    each.pop(name, None)
        cost = {name: COPY_MARGIN if name in kernel.copying else 1 for name in kernel.paths}
        return {str(rows): min(found, key=lambda name: found[name] * cost[name]) for rows, found in seconds.items()}

    def _save(self) -> None:
        part = self._path.with_suffix(f".{os.getpid()}")
        try:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            part.write_text(json.dumps(self._best, indent=1))
            part.replace(self._path)
        except OSError:  # a full disk, or a cache folder that cannot be one
            with suppress(OSError):
                part.unlink(missing_ok=True)


def table_path(device_name: str) -> Path:
    """Below the user's cache folder; BATON_CACHE names another."""
    root = os.environ.get("BATON_CACHE") or os.environ.get("XDG_CACHE_HOME")
    folder = Path(root) if root else system.with_home("~/.cache")
    engine = Path(__file__).parents[2]
    parts = [device_name, torch.__version__, *((engine / source).read_text() for source in SOURCES)]
    digest = hashlib.sha256("\0".join(parts).encode()).hexdigest()[:16]
    return folder / "baton" / f"linear-{digest}.json"


class CudaMeasure:
    """Median time of a run on the current device, the caches cold."""

    def __init__(self, device: torch.device):
        self._device = device

    def __call__(self, run: Callable[[], object]) -> float:
        flush = torch.empty(FLUSH_BYTES, dtype=torch.uint8, device=self._device)  # not kept: the pool has its place
        run()
        seconds = []
        for _ in range(NUM_RUNS):
            for _ in range(NUM_FLUSHES):
                flush.zero_()
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            begin.record()
            run()
            end.record()
            end.synchronize()
            seconds.append(begin.elapsed_time(end) / 1e3)
        return statistics.median(seconds)
