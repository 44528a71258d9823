"""The mailbox of one request: the events of all its legs, in order of arrival."""

from collections.abc import Awaitable, Iterator
from dataclasses import dataclass
from typing import Protocol

from baton.v1 import inference_pb2
from gateway.link.reader_timer import ReaderTimer


@dataclass(frozen=True, slots=True)
class Lost:
    """The session with the worker has ended, and this leg with it."""

    reason: str


class Rejoined:
    """The session is up again; posted to legs that were opened while it was not."""


class Stalled:
    """The worker's engine does not step, though its session is alive; posted again with each report that says so."""


@dataclass(slots=True)
class Tokens:
    """Tokens of one choice, in order: one row of a StepOutput, joined with later rows while nobody has read it."""

    choice: int
    first_index: int
    token_ids: list[int]
    logprobs: list[inference_pb2.Logprobs]
    finish_reason: int


class Overflow:
    """More tokens are unread than the bound allows, and the leg was cancelled."""


class EventSink(Protocol):
    """The receiver of the events of a WorkerLeg: the Mailbox of its request, or a PrefixSource."""

    def post(self, leg, event) -> None:
        """Take an event of `leg`."""

    def add(self, leg, choice: int, first_index: int, token_ids, logprobs, finish_reason: int) -> None:
        """Take a row of tokens that may wait for `flush`."""

    def flush(self) -> bool:
        """Pass on the rows that have waited; return whether there were any."""
        ...


class _Done:
    """An awaitable that is done: to await it takes no turn of the event loop."""

    def __await__(self) -> Iterator[None]:
        return iter(())


_DONE = _Done()


class Mailbox:
    """A queue of one request's events with one reader. Some events wake the reader, tokens may wait for `flush`."""

    __slots__ = ("_entries", "_has_news", "timer")

    def __init__(self) -> None:
        self._entries: list = []  # few at a time: a deque would reserve memory for 64
        self._has_news = False  # since `pop` has returned None
        self.timer = ReaderTimer()

    def post(self, leg, event) -> None:
        """Add an event and wake the reader. `leg` is None for events of the gateway itself."""
        self._entries.append((leg, event))
        self._notify()

    def add(self, leg, choice: int, first_index: int, token_ids, logprobs, finish_reason: int) -> None:
        """Add a row of tokens without waking the reader; `flush` wakes it."""
        last_leg, last = self._entries[-1] if self._entries else (None, None)
        is_next = last_leg is leg and type(last) is Tokens and last.choice == choice and not last.finish_reason
        if is_next and last.first_index + len(last.token_ids) == first_index:
            last.token_ids += token_ids
            last.logprobs += logprobs
            last.finish_reason = finish_reason
        else:
            self._entries.append((leg, Tokens(choice, first_index, token_ids, logprobs, finish_reason)))

    def flush(self) -> bool:
        """Wake the reader if there is something to read; return whether there is."""
        if self._entries:
            self._notify()
        return bool(self._entries)

    def pop(self) -> tuple | None:
        """Remove and return the next (leg, event), or return None if there is none."""
        if self._entries:
            return self._entries.pop(0)
        self._has_news = False
        return None

    def wait(self, until: float) -> Awaitable[None]:
        """Return an awaitable for the next event since `pop` returned None; it is done at `until` (time.monotonic())
        at the latest.

        This is no coroutine, which would add a quarter KB to an open stream."""
        if self._has_news:
            return _DONE
        return self.timer.wait(until)

    def close(self) -> None:
        """Cancel the timer, and drop unread events: they refer to legs, which refer back to this mailbox."""
        self.timer.close()
        self._entries.clear()

    def _notify(self) -> None:
        self._has_news = True
        self.timer.wake()
