"""Choose the fastest path of a GPU kernel for each number of rows, measured once per device, software and weight shape
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
FLUSH_BYTES = 256 << 20  # larger than the L2 of any GPU: in a model other weights are read in between
# Before each run, to hide the time that Python takes to launch it, which a graph does not need. By bandwidth an H200
# writes these once in 56 us.
NUM_FLUSHES = 4
COPY_MARGIN = 1.1  # a path that keeps a copy of the weight must be faster by this factor
# Below baton/engine; a change of these kernels makes another table.
SOURCES = (
    "layers/linear/triton.py", "layers/linear/tinygemm.py", "kernels/linear.py", "kernels/quantize.py",
    "weights/on_gpu.py",
)  # fmt: skip

logger = logging.getLogger(__name__)

Measure = Callable[[Callable[[], object]], float]  # seconds of one run


class Table:
    """Hold paths by weight and rows for one device and software. If the file cannot be written, nothing is stored."""

    def __init__(self, path: Path, measure: Measure):
        self._path, self._measure = path, measure
        try:
            self._best: dict[str, dict[str, str]] = json.loads(path.read_text())
        except (OSError, ValueError):
            self._best = {}

    @torch.inference_mode()
    def apply(self, kernel: GpuLinear, device: torch.device, dtype: torch.dtype) -> None:
        """Let the kernel use its fastest paths, and measure those that the file lacks."""
        found = self._best.get(kernel.key, {})
        if not all(found.get(str(rows)) in kernel.paths for rows in ROWS):
            x = torch.randn(ROWS[-1], kernel.num_in, device=device).to(dtype)
            found = self._fastest(kernel, x)
            self._best[kernel.key] = found
            self._save()
        limits = [float(rows) for rows in ROWS[:-1]] + [math.inf]
        kernel.use([(limit, found[str(rows)]) for limit, rows in zip(limits, ROWS, strict=True)])

    def _fastest(self, kernel: GpuLinear, x: torch.Tensor) -> dict[str, str]:
        """Return the fastest path for each of ROWS. A library's path that raises for any of them is left out, and so is
        a tile larger than the device's shared memory."""
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
        except OSError:  # a full disk, or a cache folder that cannot be made
            with suppress(OSError):
                part.unlink(missing_ok=True)


def table_path(device_name: str) -> Path:
    """Return the path of the table, below the user's cache folder or the one that BATON_CACHE names."""
    root = os.environ.get("BATON_CACHE") or os.environ.get("XDG_CACHE_HOME")
    folder = Path(root) if root else system.with_home("~/.cache")
    engine = Path(__file__).parents[2]
    parts = [device_name, torch.__version__, *((engine / source).read_text() for source in SOURCES)]
    digest = hashlib.sha256("\0".join(parts).encode()).hexdigest()[:16]
    return folder / "baton" / f"linear-{digest}.json"


class CudaMeasure:
    """Measure the median time of a run on the current device with cold caches."""

    def __init__(self, device: torch.device):
        self._device = device

    def __call__(self, run: Callable[[], object]) -> float:
        # Not kept, since the pool needs the memory.
        flush = torch.empty(FLUSH_BYTES, dtype=torch.uint8, device=self._device)
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
