"""What a request may be waiting for in the gateway, what may happen to it, and what follows: one table.

    admitting ─ granted ─► prefilling ─ accepted ─► fetching ─ done ─► decoding ─ finished ─► ending ─► ended
      │    ▲                 │  ▲  └─ done (prefilled on the decode worker) ─►┘
      │refused               │refused
      ▼    │ room            ▼  │ room
    awaiting credit        awaiting prefill

A worker that is lost or fails sends the request back to `admitting` with what it has so far; every other trouble
ends it. While it decodes, and where a client resumes, `attaching` comes before: the sequence may be there still.
"""

from enum import Enum
from typing import NamedTuple

from baton.v1 import worker_pb2 as pb
from gateway.link.mailbox import Lost, Overflow, Rejoined, Stalled, Tokens


class Phase(Enum):
    __hash__ = object.__hash__  # Enum's own is Python, and every event looks into the table

    AWAITING_CREDIT = "awaiting credit"  # every decode worker is full
    ADMITTING = "admitting"  # Admit is sent
    AWAITING_PREFILL = "awaiting prefill"  # credit is held, every prefill worker is full
    PREFILLING = "prefilling"  # Prefill is sent
    FETCHING = "fetching"  # accepted: the decode worker pulls while the prompt is read
    DECODING = "decoding"  # the first tokens are out
    ATTACHING = "attaching"  # to a sequence whose stream was lost
    ENDING = "ending"  # every choice is finished, the decode worker's report is still to come
    ENDED = "ended"


class RequestEvent(Enum):
    __hash__ = object.__hash__

    ROOM = "room"  # first in line, and something has changed
    GRANTED = "granted"
    REFUSED = "refused"
    ACCEPTED = "accepted"
    DONE = "done"
    FETCHED = "fetched"
    TOKENS = "tokens"
    FINISHED = "finished"  # the last choice
    REJOINED = "rejoined"  # a worker whose session was lost
    NOT_HERE = "not here"  # nothing to attach to
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
    GRACE_OVER = "grace over"  # this gateway must go
    OTHER = "other"  # a message that nobody asked for


class RequestTransition(NamedTuple):
    """`action` is a method of Attempts; the request moves to `phase` before it runs."""

    action: str
    phase: Phase


def _table() -> dict[tuple[Phase, RequestEvent], RequestTransition]:
    p, e = Phase, RequestEvent
    table = {(phase, event): RequestTransition("ignore", phase) for phase in p for event in e}
    for phase in p:
        if phase is p.ENDED:
            continue
        table[phase, e.DEADLINE] = RequestTransition("end_deadline", p.ENDED)
        table[phase, e.CANCEL] = RequestTransition("end_cancelled", p.ENDED)
        table[phase, e.UNREAD] = RequestTransition("end_unread", p.ENDED)
        table[phase, e.GRACE_OVER] = RequestTransition("end_draining", p.ENDED)
    # Whoever holds something of the request and goes takes the attempt along.
    for phase in (p.ADMITTING, p.AWAITING_PREFILL, p.PREFILLING, p.FETCHING, p.DECODING):
        for event in (e.DECODE_ENDED, e.DECODE_FAILED, e.DECODE_LOST):
            table[phase, event] = RequestTransition("try_again", p.ADMITTING)
        table[phase, e.DECODE_STALLED] = RequestTransition("leave_stalled", phase)
    for phase in (p.PREFILLING, p.FETCHING):
        table[phase, e.PREFILL_STALLED] = RequestTransition("leave_stalled", phase)
        for event in (e.PREFILL_ENDED, e.PREFILL_FAILED, e.PREFILL_LOST):
            table[phase, event] = RequestTransition("try_again", p.ADMITTING)
        table[phase, e.DONE] = RequestTransition("begin_answer", p.DECODING)
        table[phase, e.FETCHED] = RequestTransition("note_fetched", phase)
    return table | {
        (p.AWAITING_CREDIT, e.ROOM): RequestTransition("ask_for_credit", p.ADMITTING),
        (p.AWAITING_CREDIT, e.SILENCE): RequestTransition("end_full", p.ENDED),
        (p.ADMITTING, e.GRANTED): RequestTransition("ask_for_prefill", p.PREFILLING),
        (p.ADMITTING, e.REFUSED): RequestTransition("await_credit", p.AWAITING_CREDIT),
        (p.ADMITTING, e.SILENCE): RequestTransition("try_again", p.ADMITTING),
        (p.AWAITING_PREFILL, e.ROOM): RequestTransition("ask_for_prefill", p.PREFILLING),
        (p.AWAITING_PREFILL, e.SILENCE): RequestTransition("end_full", p.ENDED),
        (p.PREFILLING, e.ACCEPTED): RequestTransition("fetch", p.FETCHING),
        (p.PREFILLING, e.REFUSED): RequestTransition("await_prefill", p.AWAITING_PREFILL),
        (p.PREFILLING, e.SILENCE): RequestTransition("try_again", p.ADMITTING),
        (p.DECODING, e.FETCHED): RequestTransition("note_fetched", p.DECODING),
        (p.DECODING, e.DECODE_LOST): RequestTransition("reattach", p.ATTACHING),
        (p.DECODING, e.PREFILL_LOST): RequestTransition("doubt_fetch", p.DECODING),
        (p.DECODING, e.PREFILL_STALLED): RequestTransition("doubt_fetch", p.DECODING),
        (p.DECODING, e.DOUBT_OVER): RequestTransition("try_again", p.ADMITTING),
        (p.ATTACHING, e.REJOINED): RequestTransition("ask_again", p.ATTACHING),
        (p.ATTACHING, e.GRANTED): RequestTransition("go_on", p.DECODING),
        (p.ATTACHING, e.NOT_HERE): RequestTransition("ask_others", p.ATTACHING),
        (p.ATTACHING, e.REFUSED): RequestTransition("ask_others", p.ATTACHING),
        (p.ATTACHING, e.DECODE_ENDED): RequestTransition("ask_others", p.ATTACHING),
        (p.ATTACHING, e.DECODE_FAILED): RequestTransition("ask_others", p.ATTACHING),
        (p.ATTACHING, e.DECODE_LOST): RequestTransition("ask_others", p.ATTACHING),
        (p.ATTACHING, e.SILENCE): RequestTransition("begin_anew", p.ADMITTING),
        (p.DECODING, e.TOKENS): RequestTransition("take_tokens", p.DECODING),
        # What the prefill worker still does is give its lease back; if that fails, the fetch says so.
        (p.DECODING, e.FINISHED): RequestTransition("await_report", p.ENDING),
        (p.ENDING, e.DECODE_ENDED): RequestTransition("end_ok", p.ENDED),
        (p.ENDING, e.DECODE_FAILED): RequestTransition("end_ok", p.ENDED),
        (p.ENDING, e.DECODE_LOST): RequestTransition("end_ok", p.ENDED),
        (p.ENDING, e.SILENCE): RequestTransition("end_ok", p.ENDED),
        (p.ENDING, e.UNREAD): RequestTransition("ignore", p.ENDING),
    }


TABLE = _table()


_EVENTS = {
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


def event_of(message, is_prefill: bool) -> RequestEvent:
    """What a message of the prefill or the decode leg is to the request."""
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


def state_table_markdown() -> str:
    """The table for people: a row an event, a column a phase. `x → y`: action and next phase, `·`: nothing happens."""
    head = ["", *(phase.value for phase in Phase)]
    lines = [head, ["---"] * len(head)]
    for event in RequestEvent:
        lines.append([f"**{event.value}**", *(_cell_text(phase, TABLE[phase, event]) for phase in Phase)])
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def _cell_text(phase: Phase, cell: RequestTransition) -> str:
    if cell.action == "ignore":
        return "·"
    action = cell.action.replace("_", " ")
    return action if cell.phase is phase else f"{action} → {cell.phase.value}"
