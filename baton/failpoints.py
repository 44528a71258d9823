"""Let tests make this process fail at named places. Nothing happens unless BATON_FAILPOINTS is set at its start.

    BATON_FAILPOINTS="engine.step=sleep:0.02, prefill.done=kill@3"
    BATON_FAILPOINTS=@/path/of/a/file          the same text, read again whenever the file changes

The syntax is NAME[VALUE]=ACTION[:SECONDS][@N][/PATH]. With `[VALUE]` in brackets: only if the place passes that number.
With @N: only the Nth time that the place is reached since the text was read. With /PATH: only in the process that
removes that file, so once in one of several processes. Actions: sleep (blocks the thread, or with `hit_in_task` the
task), kill (SIGKILL), freeze (SIGSTOP), fail (raises FailpointError), wedge (the thread never returns), skew (a clock
that is read there is off by so many seconds). A name that is not in POINTS is refused at start. All actions but sleep
and skew are printed to stderr.
"""

import asyncio
import os
import re
import signal
import threading
import time
from collections import Counter
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path

VARIABLE = "BATON_FAILPOINTS"
POINTS = {
    "engine.step": "before a step of the engine loop",
    "engine.batch": "before a batch is computed; passes its token ids",
    "prefill.accepted": "a prompt is leased to its taker, and this is not yet announced",
    "prefill.done": "a prompt is read, and this is not yet announced",
    "transfer.ready": "before a source announces a range of KV",
    "transfer.landed": "a range of KV is here, and is not checked yet",
    "lease.clock": "where a source reads the clock of its leases",
    "decode.start": "the first tokens have come, and nothing of them is decoded yet",
    "decode.tokens": "before tokens of a running sequence are sent",
    "rank.load": "before a rank other than the first reads its part of the model",
    "rank.ready": "a rank has its part, and has not said so yet",
    "session.ended": "the last tokens are written, that they were the last is not",
}
_TEXT = re.compile(r"([a-z.]+)(?:\[(\d+)\])?=([a-z]+)(?::(-?[\d.]+))?(?:@(\d+))?(/\S+)?")
_TIMED = ("sleep", "skew")


class FailpointError(RuntimeError):
    """The action `fail` was reached."""


@dataclass(frozen=True)
class _Armed:
    name: str
    value: int | None
    action: str
    seconds: float
    only: int  # 0: every time
    token: str | None  # a file; only the process that removes it acts

    def __call__(self) -> float:
        """Do the action; return by how many seconds a clock is off."""
        if self.action == "skew":
            return self.seconds
        if self.action == "sleep":
            time.sleep(self.seconds)
            return 0.0
        os.write(2, f"failpoint {self.name}: {self.action}\n".encode())
        if self.action == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        elif self.action == "freeze":
            os.kill(os.getpid(), signal.SIGSTOP)
        elif self.action == "wedge":
            threading.Event().wait()
        else:
            raise FailpointError("a failpoint asked for this failure")
        return 0.0

    def takes_token(self) -> bool:
        """Return whether this process may act."""
        try:
            if self.token is not None:
                os.unlink(self.token)
            return True
        except FileNotFoundError:
            return False


_ACTIONS = ("sleep", "kill", "freeze", "fail", "wedge", "skew")


def parse(text: str) -> dict[str, _Armed]:
    """Return the failpoints of `text` by name. Raises ValueError, which names the part that it cannot read."""
    armed = {}
    for part in filter(None, (part.strip() for part in text.replace("\n", ",").split(","))):
        found = _TEXT.fullmatch(part)
        name, value, action, seconds, only, token = found.groups() if found else ("", *[None] * 5)
        if name not in POINTS or action not in _ACTIONS or (action in _TIMED) != bool(seconds):
            raise ValueError(
                f"{VARIABLE}: cannot read {part!r}; points: {', '.join(POINTS)}; actions: {', '.join(_ACTIONS)}"
            )
        number = int(value) if value else None
        armed[name] = _Armed(name, number, action, float(seconds or 0), int(only or 0), token)
    return armed


class _Board:
    """Hold the armed failpoints, and count how often each was passed."""

    def __init__(self, text: str):
        self._path = Path(text[1:]) if text.startswith("@") else None
        self._armed = {} if self._path else parse(text)
        self._stamp: tuple[int, int] | None = None
        self._passed: Counter[str] = Counter()
        self._lock = threading.Lock()

    def hit(self, name: str, values: Collection[int] = ()) -> float:
        armed = self.due(name, values)
        return armed() if armed is not None else 0.0

    def due(self, name: str, values: Collection[int] = ()) -> _Armed | None:
        """Count that the place is reached; return the action that is due there."""
        with self._lock:
            if self._path is not None:
                self._read_again(self._path)
            armed = self._armed.get(name)
            if armed is None or (armed.value is not None and armed.value not in values):
                return None
            self._passed[name] += 1
            is_due = armed.only in (0, self._passed[name])
        return armed if is_due and armed.takes_token() else None

    def is_armed(self, names: Collection[str]) -> bool:
        with self._lock:
            if self._path is not None:
                self._read_again(self._path)
            return not self._armed.keys().isdisjoint(names)

    def _read_again(self, path: Path) -> None:
        """Read the file if it has changed. Its inode is compared too, since a file may be replaced within one tick of
        the clock."""
        try:
            found = path.stat()
            stamp = (found.st_mtime_ns, found.st_ino)
        except FileNotFoundError:
            stamp = None
        if stamp != self._stamp:
            self._stamp = stamp
            self._armed = parse(path.read_text()) if stamp is not None else {}
            self._passed.clear()


_board = _Board(text) if (text := os.environ.get(VARIABLE, "")) else None


def hit(name: str, values: Collection[int] = ()) -> float:
    """Do what is armed at this place, which passes `values`. Return by how many seconds a clock that is read here is
    off."""
    return 0.0 if _board is None else _board.hit(name, values)


async def hit_in_task(name: str) -> None:
    """Do what `hit(name)` does, but let a sleep hold up this task only, not the event loop."""
    armed = None if _board is None else _board.due(name)
    if armed is not None and armed.action == "sleep":
        await asyncio.sleep(armed.seconds)
    elif armed is not None:
        armed()


def is_armed(*names: str) -> bool:
    """Return whether any of these places is armed, for code that would otherwise skip it more often than a test
    expects."""
    return _board is not None and _board.is_armed(names)
