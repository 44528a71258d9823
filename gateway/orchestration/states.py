"""The events of a request in the gateway; transitions.py has the table that says what follows from each."""

from enum import Enum
from typing import Generic, NamedTuple, TypeVar

from baton.v1 import worker_pb2 as pb
from gateway.link.mailbox import Lost, Overflow, Rejoined, Stalled, Tokens
from gateway.request.request_state import RequestState


class RequestEvent(Enum):
    """What can happen to a request: a message of a worker, a timeout, or something in this gateway."""

    __hash__ = object.__hash__  # Enum's own is in Python, and each event is looked up in the table

    RESUMED = "resumed"  # the client continues an answer that broke off
    CAPACITY = "capacity"  # the request is first in its queue, and something has changed
    GRANTED = "granted"
    REFUSED = "refused"
    ACCEPTED = "accepted"
    DONE = "done"
    FETCHED = "fetched"
    TOKENS = "tokens"
    FINISHED = "finished"  # the last choice
    REJOINED = "rejoined"  # the session with a lost worker is up again
    NOT_HERE = "not here"  # the worker does not have the sequence
    DECODE_ENDED = "decode ended"
    DECODE_FAILED = "decode failed"
    DECODE_LOST = "decode worker lost"
    PREFILL_ENDED = "prefill ended"
    PREFILL_FAILED = "prefill failed"
    PREFILL_LOST = "prefill worker lost"
    DECODE_STALLED = "decode worker stalled"
    PREFILL_STALLED = "prefill worker stalled"
    DOUBT_OVER = "doubt over"  # a fetch has not ended, and its source was lost a while ago
    SILENCE = "silence"  # no answer, or no room, for too long
    UNREAD = "unread"  # the client does not read
    DEADLINE = "deadline"
    CANCEL = "cancel"
    GRACE_OVER = "grace over"  # this gateway must exit
    OTHER = "other"  # an unexpected message


Payload = TypeVar("Payload", covariant=True)


class Occurrence(NamedTuple, Generic[Payload]):
    """An event as it happened: the state before it, since when the request was in that state (time.monotonic()), and
    what came with the event: a worker's message, or the leg that it is about while the request is attaching."""

    kind: RequestEvent
    before: RequestState
    since: float
    payload: Payload


_EVENTS: dict[type, RequestEvent] = {
    pb.Granted: RequestEvent.GRANTED,
    pb.Refused: RequestEvent.REFUSED,
    pb.Accepted: RequestEvent.ACCEPTED,
    pb.Done: RequestEvent.DONE,
    pb.Fetched: RequestEvent.FETCHED,
    Tokens: RequestEvent.TOKENS,
    Overflow: RequestEvent.UNREAD,
    Rejoined: RequestEvent.REJOINED,
    pb.NotHere: RequestEvent.NOT_HERE,
}


def event_of(message: object, is_prefill: bool) -> RequestEvent:
    """Return the event for a message of the prefill leg (`is_prefill`) or of the decode leg."""
    if (event := _EVENTS.get(type(message))) is not None:
        return event
    if isinstance(message, Lost):
        return RequestEvent.PREFILL_LOST if is_prefill else RequestEvent.DECODE_LOST
    if isinstance(message, Stalled):
        return RequestEvent.PREFILL_STALLED if is_prefill else RequestEvent.DECODE_STALLED
    if isinstance(message, pb.Ended):
        if message.code:
            return RequestEvent.PREFILL_FAILED if is_prefill else RequestEvent.DECODE_FAILED
        return RequestEvent.PREFILL_ENDED if is_prefill else RequestEvent.DECODE_ENDED
    return RequestEvent.OTHER
