"""The result of one check of a step: what was checked, whether it is right, and the figures."""

import json
from collections.abc import Callable
from dataclasses import asdict, dataclass

from baton.lines import one_line

# what was checked; right, wrong or None for nothing to check; the figures in words
Say = Callable[[str, bool | None, str], None]
_MARKS = {True: "  ok  ", False: "  FAIL", None: "   -  "}


@dataclass(frozen=True, slots=True)
class Check:
    """One row of the table."""

    step: str
    what: str
    is_right: bool | None
    text: str

    @property
    def row(self) -> str:
        return f"{_MARKS[self.is_right]}  {self.step:<8} {self.what:<34} {one_line(self.text)}"

    def to_json(self) -> str:
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, line: str) -> "Check":
        """Parse a line that `to_json` wrote. Raises ValueError for another line."""
        try:
            return cls(**json.loads(line))
        except TypeError as error:
            raise ValueError(f"no check: {line[:80]}") from error


def sayer(step: str, add: Callable[[Check], None]) -> Say:
    """Return the function with which a step reports its checks."""
    return lambda what, is_right, text: add(Check(step, what, is_right, text))
