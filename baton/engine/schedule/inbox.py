"""Messages into the loop: plain commands, in order, and the bell that wakes it.

A command names its group by key and arrival: when it is obeyed, the key may have ended and come again.
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
    """A group that was admitted or accepted will be prefilled here."""

    key: Key
    arrival: int


class Start(NamedTuple):
    """Continue a fetched prompt with these first tokens."""

    key: Key
    arrival: int
    first_tokens: tuple[FirstToken, ...]


class Stop(NamedTuple):
    """A group ends: cancelled."""

    key: Key
    arrival: int


class Park(NamedTuple):
    """A group of the loop stops: blocks back, token record kept."""

    key: Key
    arrival: int


class Resume(NamedTuple):
    """Continue a parked group, by a prefix hit."""

    key: Key
    arrival: int


GroupCommand = Enter | Start | Stop | Park | Resume
Command = GroupCommand | RequestEnded  # RequestEnded: of a key that the loop never had, to be given out


class Inbox:
    """A queue with one reader, the loop, and any number of writers. Thread-safe."""

    def __init__(self):
        self._commands: deque[Command] = deque()
        self._bell = threading.Condition()
        self._rung = ctypes.c_int32(0)

    def __len__(self) -> int:
        return len(self._commands)

    def post(self, command: Command) -> None:
        self._commands.append(command)
        self.ring()

    def ring(self) -> None:
        with self._bell:
            self._rung.value = 1
            self._bell.notify()

    @property
    def address(self) -> int:
        """Return the address of an int32 that is not 0 from a ring until the next `drain`: native code that computes
        several steps looks at it."""
        return ctypes.addressof(self._rung)

    def drain(self) -> Iterator[Command]:
        """Takes the commands one by one: where the reader fails, the rest stays."""
        self._rung.value = 0  # before they are taken: what is posted meanwhile rings again
        while self._commands:
            yield self._commands.popleft()

    def wait(self, timeout_s: float) -> None:
        """Returns when something was posted since the last `drain`, or after `timeout_s`."""
        with self._bell:
            if not self._rung.value:
                self._bell.wait(timeout_s)


class PendingCommands:
    """Commands that wait for the grammars of their groups, in order. The loop's; `ring` wakes it where one is there."""

    def __init__(self, ring: Callable[[], None]):
        self._ring = ring
        self._commands: dict[Future[Grammar], list[GroupCommand]] = {}

    def __bool__(self) -> bool:
        return bool(self._commands)

    def keeps(self, grammar: Future[Grammar] | None, command: GroupCommand) -> bool:
        """Return whether a command waits for its group's grammar, or behind one that did: then it is kept."""
        if grammar is None or (grammar.done() and grammar not in self._commands):
            return False
        self._commands.setdefault(grammar, []).append(command)
        grammar.add_done_callback(lambda _: self._ring())
        return True

    def take_ready(self) -> Iterator[GroupCommand]:
        """Take the commands whose grammars are there now."""
        for grammar in [grammar for grammar in self._commands if grammar.done()]:
            yield from self._commands.pop(grammar)
