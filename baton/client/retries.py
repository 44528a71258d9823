"""Whether a call that failed is sent again, when, and to which address."""

import random
import threading
import time
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Generic, Protocol, TypeVar

import grpc

from baton.client.errors import CallError

_SPREAD = 0.2  # of a pause that a gateway asks for: clients that were refused together come back apart


@dataclass(frozen=True)
class RetryPolicy:
    """How often a call is sent again that failed for a reason that passes. `max_attempts` counts those in a row that
    brought nothing: 1 sends once. Pauses double from the first to the longest, unless the gateway names one.
    `counts_refusals` False: a call that a gateway refuses for now is sent again until its timeout; only attempts that
    nobody answers count."""

    max_attempts: int = 10
    first_pause_s: float = 0.05
    longest_pause_s: float = 2.0
    counts_refusals: bool = True

    @property
    def resends(self) -> bool:
        """Return whether anything is sent twice."""
        return self.max_attempts > 1


NO_RETRIES = RetryPolicy(max_attempts=1)


class Attempts:
    """The attempts of one call, all within one timeout."""

    def __init__(self, policy: RetryPolicy, timeout_s: float | None):
        self._policy = policy
        self._deadline = None if timeout_s is None else time.monotonic() + timeout_s
        self._num_failed = 0  # in a row
        self.num = 1

    @property
    def left_s(self) -> float | None:
        """Seconds until the deadline; None: there is none."""
        return None if self._deadline is None else max(0.0, self._deadline - time.monotonic())

    def progressed(self) -> None:
        """Note that an attempt brought something, or an answer that does not count."""
        self._num_failed = 0

    def pause_s(self, error: CallError) -> float:
        """Return how long to wait before the next attempt. Raises `error` if there is none."""
        if not self._passes(error):
            raise error
        policy = self._policy
        if policy.counts_refusals or error.code() is not grpc.StatusCode.RESOURCE_EXHAUSTED:
            self._num_failed += 1
        else:
            self.progressed()
        if error.retry_after_s is None:
            longest = min(policy.longest_pause_s, policy.first_pause_s * 2 ** min(self._num_failed - 1, 30))
            pause_s = random.uniform(longest / 2, longest)
        else:
            pause_s = error.retry_after_s * random.uniform(1.0, 1.0 + _SPREAD)
        left_s = self.left_s
        if self._num_failed >= policy.max_attempts or (left_s is not None and pause_s >= left_s):
            raise error
        self.num += 1
        return pause_s

    def _passes(self, error: CallError) -> bool:
        """Return whether the same call may succeed later: nobody was there, or it was refused for now. Work that was
        begun and lost is no reason against it: it has no effect beside its answer."""
        code = error.code()
        if code is grpc.StatusCode.ALREADY_EXISTS:  # our own last attempt, which the gateway still takes for alive
            return self.num > 1 and error.reason == "REQUEST_ID_IN_USE"
        if code is grpc.StatusCode.RESOURCE_EXHAUSTED:
            return error.retry_after_s is not None
        return is_gone(error)


def is_gone(error: CallError) -> bool:
    """Return whether nobody is there. Without a reason CANCELLED is gRPC's own word: a server that shuts down says it
    of calls that it has not begun; and so is INTERNAL with RST_STREAM, by which a proxy ends a stream whose gateway
    died."""
    code = error.code()
    if code is grpc.StatusCode.INTERNAL:
        return not error.reason and "RST_STREAM" in error.message
    return code is grpc.StatusCode.UNAVAILABLE or (code is grpc.StatusCode.CANCELLED and not error.reason)


OpenT = TypeVar("OpenT")


class Settable(Protocol):
    """An Event, of threading or of asyncio."""

    def set(self) -> None: ...


class Addresses(Generic[OpenT]):
    """Gateways of which any will do: one, drawn at random, is kept until it fails, then the next. Threads may share
    it."""

    def __init__(self, target: str | Sequence[str], open_one: Callable[[str], OpenT]):
        """`target`: host:port, several with commas between or as a sequence. Raises ValueError."""
        parts = target.split(",") if isinstance(target, str) else target
        self.targets = tuple(part.strip() for part in parts if part.strip())
        if not self.targets:
            raise ValueError("no address: give host:port")
        self._open_one, self._opened = open_one, dict[int, OpenT]()
        self._current = random.randrange(len(self.targets))  # clients that are told alike do not all ask one
        self._is_closed, self._lock = False, threading.Lock()
        self._pauses = set[Settable]()

    def current(self) -> tuple[int, OpenT]:
        """Return the address to ask, by number, and what is open to it. Raises CallError once they are closed."""
        with self._lock:
            if self._is_closed:
                raise CallError(grpc.StatusCode.CANCELLED, "this client is closed")
            index = self._current
            if index not in self._opened:
                self._opened[index] = self._open_one(self.targets[index])
            return index, self._opened[index]

    def leave(self, index: int, error: CallError) -> None:
        """Ask the next address from now on, if nobody answers at this one and no other call has left it already."""
        if is_gone(error) and index == self._current:
            self._current = (index + 1) % len(self.targets)

    @contextmanager
    def ending(self, pause: Settable) -> Generator[None]:
        """Have `close()` set what a call waits for before it is sent again; it is set at once where they are closed."""
        with self._lock:
            self._pauses.add(pause)
            if self._is_closed:
                pause.set()
        try:
            yield
        finally:
            with self._lock:
                self._pauses.discard(pause)

    def close(self) -> list[OpenT]:
        """Open nothing any more, end all pauses, and return all that was opened."""
        with self._lock:
            self._is_closed = True
            for pause in self._pauses:
                pause.set()
            return list(self._opened.values())
