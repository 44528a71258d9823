"""The service level objective of a request, written as on the command line: ttft=300ms,tpot=50ms."""

import math
import re
from typing import NamedTuple

_PART = re.compile(r"(ttft|tpot|e2e)=([0-9]*\.?[0-9]+(?:e[+-]?[0-9]+)?)(ms|s)")


class Slo(NamedTuple):
    """Bounds in seconds; None means no bound."""

    ttft_s: float | None = None
    tpot_s: float | None = None
    e2e_s: float | None = None

    def __str__(self) -> str:
        parts = [(name[:-2], value) for name, value in self._asdict().items() if value is not None]
        return ",".join(f"{name}={1e3 * value:.12g}ms" for name, value in parts)

    def missed(self, ttft_s: float | None, tpot_s: float | None, e2e_s: float) -> list[str]:
        """Return which of ttft, tpot and e2e exceed their bounds. A measure that is None cannot: an answer of one token
        has no `tpot_s`."""
        measured = {"ttft": ttft_s, "tpot": tpot_s, "e2e": e2e_s}
        bounds = zip(self, measured.items(), strict=True)
        return [name for bound, (name, value) in bounds if bound is not None and value is not None and value > bound]

    def met(self, ttft_s: float, tpot_s: float | None, e2e_s: float) -> bool:
        return not self.missed(ttft_s, tpot_s, e2e_s)


def parse_slo(text: str) -> Slo:
    """Parse objectives as `ttft=300ms,tpot=50ms`. Raises ValueError that names the invalid part."""
    bounds: dict[str, float] = {}
    for part in text.split(","):
        found = _PART.fullmatch(part.strip())
        if found is None or math.isinf(1e3 * float(found[2])):
            raise ValueError(f"{part.strip()!r} is not an objective; write for instance ttft=300ms,tpot=50ms")
        name = f"{found[1]}_s"
        if name in bounds:
            raise ValueError(f"{found[1]} is given twice")
        bounds[name] = float(found[2]) / (1000 if found[3] == "ms" else 1)
    return Slo(**bounds)
