"""Carry commands from other threads to the loop, in order, and wake it.

A command names its group by key and arrival: before the loop reads it, the key may have ended and been used again.
"""

import ctypes
import threading
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from typing import NamedTuple

from baton.constraints.grammar import Grammar
from baton.engine.core.request import FirstToken, Key, RequestEnded


class Enter(NamedTuple):
    """Prefill a group that was admitted or accepted."""

    key: Key
    arrival: int


class Start(NamedTuple):
    """Decode a fetched prompt from these first tokens."""

    key: Key
    arrival: int
    first_tokens: tuple[FirstToken, ...]


class Stop(NamedTuple):
    """End a group as cancelled."""

    key: Key
    arrival: int


class Park(NamedTuple):
    """Stop a running group: release its blocks and keep its tokens."""

    key: Key
    arrival: int


class Resume(NamedTuple):
    """Queue a parked group again."""

    key: Key
    arrival: int


GroupCommand = Enter | Start | Stop | Park | Resume
Command = GroupCommand | RequestEnded  # RequestEnded: the end of a key that the loop never had, to be passed on as an
# output


class Inbox:
    """A command queue with one reader (the loop) and any number of writers. Thread-safe."""

    def __init__(self):
        self._commands: deque[Command] = deque()
        self._bell = threading.Condition()
        self._rung = ctypes.c_int32(0)

    def __len__(self) -> int:
        return len(self._commands)

    def post(self, command: Command) -> None:
        """Add a command and wake the loop."""
        self._commands.append(command)
        self.ring()

    def ring(self) -> None:
        """Wake the loop."""
        with self._bell:
            self._rung.value = 1
            self._bell.notify()

    @property
    def address(self) -> int:
        """The address of an int32 that is nonzero from a ring until the next `drain`; native code that computes several
        steps polls it."""
        return ctypes.addressof(self._rung)

    def drain(self) -> Iterator[Command]:
        """Yield the commands, removing them one by one; if the reader fails, the rest stays."""
        self._rung.value = 0  # reset before reading: commands posted meanwhile ring again
        while self._commands:
            yield self._commands.popleft()

    def wait(self, timeout_s: float) -> None:
        """Wait until a ring since the last `drain`, at most `timeout_s`."""
        with self._bell:
            if not self._rung.value:
                self._bell.wait(timeout_s)


class PendingCommands:
    """Hold commands until the grammars of their groups are compiled, in order. Belongs to the loop's thread."""

    def __init__(self, ring: Callable[[], None]):
        """Take `ring`, called when a grammar is ready."""
        self._ring = ring
        self._commands: dict[Future[Grammar], list[GroupCommand]] = {}

    def __bool__(self) -> bool:
        return bool(self._commands)

    def keeps(self, grammar: Future[Grammar] | None, command: GroupCommand) -> bool:
        """Keep a command whose group's grammar is not ready, or that follows a kept one. Returns whether it was
        kept."""
        if grammar is None or (grammar.done() and grammar not in self._commands):
            return False
        self._commands.setdefault(grammar, []).append(command)
        grammar.add_done_callback(lambda _: self._ring())
        return True

    def take_ready(self) -> Iterator[GroupCommand]:
        """Yield and remove the commands whose grammars are ready."""
        for grammar in [grammar for grammar in self._commands if grammar.done()]:
            yield from self._commands.pop(grammar)
