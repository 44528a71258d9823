"""The events that can happen to a request in the gateway; transitions.py has the table."""

from enum import Enum
from typing import Generic, NamedTuple, TypeVar

from baton.v1 import worker_pb2 as pb
from gateway.link.mailbox import Lost, Overflow, Rejoined, Stalled, Tokens
from gateway.request.request_state import RequestState


class RequestEvent(Enum):
    __hash__ = object.__hash__

    RESUMED = "resumed"  # the client continues an answer that broke off
    ROOM = "room"  # first in line, and something has changed
    GRANTED = "granted"
    REFUSED = "refused"
    ACCEPTED = "accepted"
    DONE = "done"
    FETCHED = "fetched"
    TOKENS = "tokens"
    FINISHED = "finished"  # the last choice
    REJOINED = "rejoined"  # a worker whose session was lost
    NOT_HERE = "not here"  # the worker has nothing to attach to
    DECODE_ENDED = "decode ended"
    DECODE_FAILED = "decode failed"
    DECODE_LOST = "decode worker lost"
    PREFILL_ENDED = "prefill ended"
    PREFILL_FAILED = "prefill failed"
    PREFILL_LOST = "prefill worker lost"
    DECODE_STALLED = "decode worker stalled"
    PREFILL_STALLED = "prefill worker stalled"
    DOUBT_OVER = "doubt over"  # a fetch whose source was lost has not ended
    SILENCE = "silence"  # no answer, or no room, for too long
    UNREAD = "unread"  # the client does not read
    DEADLINE = "deadline"
    CANCEL = "cancel"
    GRACE_OVER = "grace over"  # this gateway must exit
    OTHER = "other"  # an unexpected message


Message = TypeVar("Message", covariant=True)


class Occurrence(NamedTuple, Generic[Message]):
    """An event as it happened: in which state, since when (time.monotonic()) that lasted, and the message that came."""

    event: RequestEvent
    before: RequestState
    since: float
    message: Message


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
    """Return the event that a message of the prefill or the decode leg is."""
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
