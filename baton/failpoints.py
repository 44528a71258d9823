"""Named places where a test may hurt this process: nothing at all unless BATON_FAILPOINTS is set when it starts.

    BATON_FAILPOINTS="engine.step=sleep:0.02, prefill.done=kill@3"
    BATON_FAILPOINTS=@/path/of/a/file          the same text, read again whenever the file changes

NAME=ACTION[:SECONDS][@N]; with @N only the Nth time that the place is passed (counted since the text was read).
Actions: sleep (blocks the thread that passes), kill (SIGKILL), freeze (SIGSTOP), fail (raises FailpointError), wedge
(the thread never comes back). The names are those in POINTS; any other is refused at start.
"""

import os
import signal
import threading
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

VARIABLE = "BATON_FAILPOINTS"
POINTS = {
    "engine.step": "before a step of the engine loop",
}


class FailpointError(RuntimeError):
    """What the action `fail` raises."""


@dataclass(frozen=True)
class _Armed:
    action: str
    seconds: float
    only: int  # 0: every time

    def __call__(self) -> None:
        if self.action == "sleep":
            time.sleep(self.seconds)
        elif self.action == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        elif self.action == "freeze":
            os.kill(os.getpid(), signal.SIGSTOP)
        elif self.action == "wedge":
            threading.Event().wait()
        else:
            raise FailpointError("a failpoint asked for this failure")


_ACTIONS = ("sleep", "kill", "freeze", "fail", "wedge")


def parse(text: str) -> dict[str, _Armed]:
    """Raises ValueError that names the part it cannot read."""
    armed = {}
    for part in filter(None, (part.strip() for part in text.replace("\n", ",").split(","))):
        name, _, what = part.partition("=")
        what, _, only = what.partition("@")
        action, _, seconds = what.partition(":")
        if name not in POINTS or action not in _ACTIONS or (action == "sleep") != bool(seconds):
            raise ValueError(f"{VARIABLE}: cannot read {part!r}; points: {', '.join(POINTS)}; actions: {', '.join(_ACTIONS)}")
        armed[name] = _Armed(action, float(seconds or 0), int(only or 0))
    return armed


class _Board:
    """What is armed now, and how often each place was passed."""

    def __init__(self, text: str):
        self._path = Path(text[1:]) if text.startswith("@") else None
        self._armed = {} if self._path else parse(text)
        self._stamp: int | None = None
        self._passed: Counter[str] = Counter()
        self._lock = threading.Lock()

    def hit(self, name: str) -> None:
        with self._lock:
            if self._path is not None:
                self._read_again()
            self._passed[name] += 1
            armed, count = self._armed.get(name), self._passed[name]
        if armed is not None and armed.only in (0, count):
            armed()

    def _read_again(self) -> None:
        stamp = self._path.stat().st_mtime_ns if self._path.exists() else None
        if stamp != self._stamp:
            self._stamp = stamp
            self._armed = parse(self._path.read_text()) if stamp is not None else {}
            self._passed.clear()


def _nothing(name: str) -> None:
    pass


def _make(text: str) -> Callable[[str], None]:
    return _Board(text).hit if text else _nothing


hit = _make(os.environ.get(VARIABLE, ""))
