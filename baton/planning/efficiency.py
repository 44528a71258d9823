"""Kernel efficiencies: how near kernels come to the limit of their device. They are measured by class and shape, and
kept in a file per kind of device (`python bench/kernels.py` writes one). The limit is the longer of bytes over the rate
of memory (of the cache, if everything that a step reads stays there) and operations over the rate of products.
Efficiency is that time over the measured one."""

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

FOLDER = Path(__file__).with_name("measured")
MEASURED, INTERPOLATED, EXTRAPOLATED = "measured", "interpolated", "extrapolated"
_ORDER = (MEASURED, INTERPOLATED, EXTRAPOLATED)
# The form whose efficiencies are taken for an unmeasured form: it computes alike.
_NEXT = {"int4-g32": "int8", "fp8": "none", "fp32": "none"}
_NEAR = 0.05  # in the logarithm: a size this near to a measured point counts as measured


@dataclass(frozen=True)
class Point:
    """One measured efficiency. `size`: bytes that the kernel reads of one layer's weights, or of KV; `rows`: tokens;
    `is_cached`: the previous step left everything that this one reads in the cache."""

    kind: str
    form: str
    size: float
    rows: float
    efficiency: float
    is_cached: bool = False


@dataclass(frozen=True)
class HostCosts:
    """Seconds outside kernels: per step; per sequence in a step; per request on its way in; per token on its way out,
    of the cores of gateway and client; per KV handover in addition to its bytes; and how much longer a first token
    takes if another worker reads the prompt."""

    step_s: float
    sequence_s: float
    request_s: float
    token_s: float
    handover_s: float
    split_s: float


@dataclass
class Efficiencies:
    """The points of one device. `used` collects how sure each answer of `of` was."""

    name: str
    host: HostCosts
    points: Sequence[Point]
    is_measured: bool
    threads: int = 1
    bytes_per_s: float = 0.0  # of the machine that measured; 0: see the device's own table
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
        """How sure a plan by these points is: as its least sure answer."""
        return max(self.used, key=_ORDER.index, default=MEASURED)

    def of(self, kind: str, form: str, size: float, rows: float, is_cached: bool = False) -> float:
        """Return the efficiency of a kernel, interpolated in the logarithms of size and rows. Raises KeyError if
        neither the form nor one that computes alike was measured."""
        own = self._tables.get((kind, form, is_cached)) or self._tables.get((kind, "*", is_cached))
        table = own or self._tables[kind, _NEXT[form], is_cached]
        sizes = sorted(table)
        low, high, part, confidence = _between(sizes, size)
        values = [_on_line(table[each], rows) for each in (low, high)]
        is_known = self.is_measured and own is not None
        self.used.add(max((confidence, values[0][1], values[1][1]), key=_ORDER.index) if is_known else EXTRAPOLATED)
        return values[0][0] ** (1 - part) * values[1][0] ** part

    def forms(self, kind: str) -> set[str]:
        return {form for each, form, _ in self._tables if each == kind}


def _between(values: Sequence[float], wanted: float) -> tuple[float, float, float, str]:
    """Return the neighbours of `wanted`, its logarithmic position between them (0 to 1), and how sure a value there is.
    Outside the measured range, the nearest end counts."""
    if wanted <= values[0] or wanted >= values[-1]:
        end = values[0] if wanted <= values[0] else values[-1]
        return end, end, 0.0, MEASURED if abs(math.log(max(wanted, 1) / end)) < _NEAR else EXTRAPOLATED
    high = next(value for value in values if value > wanted)
    low = values[values.index(high) - 1]
    part = math.log(wanted / low) / math.log(high / low)
    return low, high, part, MEASURED if part < _NEAR else INTERPOLATED


def _on_line(line: Sequence[tuple[float, float]], rows: float) -> tuple[float, str]:
    known = dict(line)
    low, high, part, confidence = _between(sorted(known), rows)
    return known[low] ** (1 - part) * known[high] ** part, confidence


def read_efficiencies(path: Path) -> Efficiencies:
    """Read a file that bench/kernels.py wrote. Raises ValueError, one line that names the file."""
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
    """Return the shipped efficiencies: those measured for cpu, or those assumed for every GPU."""
    return read_efficiencies(FOLDER / f"{kind}.json")
