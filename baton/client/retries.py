"""Decide whether a failed call is sent again, when, and to which address."""

import random
import threading
import time
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Generic, Protocol, TypeVar

import grpc

from baton.client.errors import CallError

# of a pause that a gateway asks for, so that clients that were refused together return at different times
_SPREAD = 0.2


@dataclass(frozen=True)
class RetryPolicy:
    """How often a call is retried after an error that may pass. `max_attempts` counts consecutive attempts without
    progress: 1 sends once. Pauses double from the first to the longest, unless the gateway asks for one. With
    `counts_refusals` False, a call that gateways refuse for now is retried until its timeout; only attempts without an
    answer count."""

    max_attempts: int = 10
    first_pause_s: float = 0.05
    longest_pause_s: float = 2.0
    counts_refusals: bool = True

    @property
    def resends(self) -> bool:
        """Whether a call may be sent more than once."""
        return self.max_attempts > 1


NO_RETRIES = RetryPolicy(max_attempts=1)


class Attempts:
    """The attempts of one call, within one timeout."""

    def __init__(self, policy: RetryPolicy, timeout_s: float | None):
        self._policy = policy
        self._deadline = None if timeout_s is None else time.monotonic() + timeout_s
        self._num_failed = 0  # consecutive
        self.num = 1

    @property
    def left_s(self) -> float | None:
        """Seconds until the deadline; None without one."""
        return None if self._deadline is None else max(0.0, self._deadline - time.monotonic())

    def progressed(self) -> None:
        """Record progress: the stream delivered something, or the gateway gave an answer that does not count."""
        self._num_failed = 0

    def pause_s(self, error: CallError) -> float:
        """Return how long to wait before the next attempt, in seconds. Raises `error` if there is none."""
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
            pause_s = min(error.retry_after_s * random.uniform(1.0, 1.0 + _SPREAD), threading.TIMEOUT_MAX)
        left_s = self.left_s
        if self._num_failed >= policy.max_attempts or (left_s is not None and pause_s >= left_s):
            raise error
        self.num += 1
        return pause_s

    def _passes(self, error: CallError) -> bool:
        """Return whether the same call may succeed later: no gateway answered, or it refused the call for now. It is
        safe to repeat work that was begun and lost, since its only effect is its answer."""
        code = error.code()
        if code is grpc.StatusCode.ALREADY_EXISTS:  # our own previous attempt, which the gateway still takes for alive
            return self.num > 1 and error.reason == "REQUEST_ID_IN_USE"
        if code is grpc.StatusCode.RESOURCE_EXHAUSTED:
            return error.retry_after_s is not None
        return is_gone(error)


def is_gone(error: CallError) -> bool:
    """Return whether no gateway answered. Without a reason, CANCELLED is gRPC's own status for calls that a stopping
    server has not begun, and INTERNAL with RST_STREAM is how a proxy ends a stream whose gateway died."""
    code = error.code()
    if code is grpc.StatusCode.INTERNAL:
        return not error.reason and "RST_STREAM" in error.message
    return code is grpc.StatusCode.UNAVAILABLE or (code is grpc.StatusCode.CANCELLED and not error.reason)


OpenT = TypeVar("OpenT")


class Settable(Protocol):
    """An Event of threading or of asyncio."""

    def set(self) -> None: ...


class Addresses(Generic[OpenT]):
    """Interchangeable gateways. One, drawn at random, is used until it fails, then the next. Threads may share the
    object."""

    def __init__(self, target: str | Sequence[str], open_one: Callable[[str], OpenT]):
        """Parse `target`: host:port, several with commas between or as a sequence. Raises ValueError."""
        parts = target.split(",") if isinstance(target, str) else target
        self.targets = tuple(part.strip() for part in parts if part.strip())
        if not self.targets:
            raise ValueError("no address: give host:port")
        self._open_one, self._opened = open_one, dict[int, OpenT]()
        # so that clients with the same list do not all ask the same gateway
        self._current = random.randrange(len(self.targets))
        self._is_closed, self._lock = False, threading.Lock()
        self._pauses = set[Settable]()

    def current(self) -> tuple[int, OpenT]:
        """Return the index of the current address, and what is open to it. Raises CallError after close()."""
        with self._lock:
            if self._is_closed:
                raise CallError(grpc.StatusCode.CANCELLED, "this client is closed")
            index = self._current
            if index not in self._opened:
                self._opened[index] = self._open_one(self.targets[index])
            return index, self._opened[index]

    def leave(self, index: int, error: CallError) -> None:
        """Use the next address from now on, if this one did not answer and no other call has left it already."""
        if is_gone(error) and index == self._current:
            self._current = (index + 1) % len(self.targets)

    @contextmanager
    def ending(self, pause: Settable) -> Generator[None]:
        """Let `close()` set the event on which a call waits before its retry; set it now if already closed."""
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
        """Open nothing more, end all pauses, and return everything that was opened."""
        with self._lock:
            self._is_closed = True
            for pause in self._pauses:
                pause.set()
            return list(self._opened.values())
