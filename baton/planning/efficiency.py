"""How near kernels come to what their device could do at best: measured by class and shape, and kept in a file for each
kind of device (`python bench/kernels.py` writes one). The best is bytes over the rate of memory, of the cache where all
that a step reads stays there, or operations over that of products, whichever takes longer; efficiency is that over the
seconds measured."""

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

FOLDER = Path(__file__).with_name("measured")
MEASURED, INTERPOLATED, EXTRAPOLATED = "measured", "interpolated", "extrapolated"
_ORDER = (MEASURED, INTERPOLATED, EXTRAPOLATED)
# What is taken for a form of which nothing was measured: it computes alike.
_NEXT = {"int4-g32": "int8", "fp8": "none", "fp32": "none"}
_NEAR = 0.05  # of the logarithm: so near a point counts as measured


@dataclass(frozen=True)
class Point:
    """One measured efficiency: `size` is what the kernel reads of one layer's weights, or of KV, in bytes; `rows` its
    tokens; `is_cached`: what the step reads was in the cache since the step before."""

    kind: str
    form: str
    size: float
    rows: float
    efficiency: float
    is_cached: bool = False


@dataclass(frozen=True)
class HostCosts:
    """Seconds that are not kernels': of a step, of each sequence in it, of a request on its way in, of a token on its
    way out by the cores of gateway and client, of a handover of KV besides its bytes, and of what a request waits
    longer for its first token where another worker reads it."""

    step_s: float
    sequence_s: float
    request_s: float
    token_s: float
    handover_s: float
    split_s: float


@dataclass
class Efficiencies:
    """The points of one device. `surest` of a plan is the worst of what `of` has answered by."""

    name: str
    host: HostCosts
    points: Sequence[Point]
    is_measured: bool
    threads: int = 1
    bytes_per_s: float = 0.0  # of the machine that measured; 0: the device's own table has them
    cache_bytes_per_s: float = 0.0
    flops_per_s: float = 0.0
    used: set[str] = field(default_factory=set)

    def __post_init__(self) -> None:
        self._tables: dict[tuple[str, str, bool], dict[float, list[tuple[float, float]]]] = {}
        for point in self.points:
            table = self._tables.setdefault((point.kind, point.form, point.is_cached), {})
            table.setdefault(point.size, []).append((point.rows, point.efficiency))
        for table in self._tables.values():
            for line in table.values():
                line.sort()

    @property
    def confidence(self) -> str:
        """Return how sure a plan by these is: the least sure thing it asked for."""
        return max(self.used, key=_ORDER.index, default=MEASURED)

    def of(self, kind: str, form: str, size: float, rows: float, is_cached: bool = False) -> float:
        """Return the efficiency of a kernel, interpolated in the logarithms of size and rows. Raises KeyError for a
        form of which nothing is known, nor of one that computes alike."""
        own = self._tables.get((kind, form, is_cached)) or self._tables.get((kind, "*", is_cached))
        table = own or self._tables[kind, _NEXT[form], is_cached]
        sizes = sorted(table)
        low, high, part, sure = _between(sizes, size)
        values = [_on_line(table[each], rows) for each in (low, high)]
        is_known = self.is_measured and own is not None
        self.used.add(max((sure, values[0][1], values[1][1]), key=_ORDER.index) if is_known else EXTRAPOLATED)
        return values[0][0] ** (1 - part) * values[1][0] ** part

    def forms(self, kind: str) -> set[str]:
        return {form for each, form, _ in self._tables if each == kind}


def _between(values: Sequence[float], wanted: float) -> tuple[float, float, float, str]:
    """Return the neighbours of `wanted`, how far it is from the lower to the higher by the logarithm, and how sure that
    is. Beyond the ends the nearest counts."""
    if wanted <= values[0] or wanted >= values[-1]:
        end = values[0] if wanted <= values[0] else values[-1]
        return end, end, 0.0, MEASURED if abs(math.log(max(wanted, 1) / end)) < _NEAR else EXTRAPOLATED
    high = next(value for value in values if value > wanted)
    low = values[values.index(high) - 1]
    part = math.log(wanted / low) / math.log(high / low)
    return low, high, part, MEASURED if part < _NEAR else INTERPOLATED


def _on_line(line: Sequence[tuple[float, float]], rows: float) -> tuple[float, str]:
    known = dict(line)
    low, high, part, sure = _between(sorted(known), rows)
    return known[low] ** (1 - part) * known[high] ** part, sure


def read_efficiencies(path: Path) -> Efficiencies:
    """Read a file that bench/kernels.py wrote. Raises ValueError, one line that names it."""
    try:
        values = json.loads(path.read_text())
        return Efficiencies(
            values["device"],
            HostCosts(**values["host"]),
            [Point(*each) for each in values["points"]],
            bool(values["measured"]),
            int(values["threads"]),
            float(values["bytes_per_s"]),
            float(values["cache_bytes_per_s"]),
            float(values["flops_per_s"]),
        )
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ValueError(f"{path}: not a file of kernel efficiencies ({error}); bench/kernels.py writes one") from None


def shipped(kind: str) -> Efficiencies:
    """Return the shipped file for cpu, or what is assumed of every GPU."""
    return read_efficiencies(FOLDER / f"{kind}.json")
