"""The table of a request: the action and the next state for each event in each state.

    admitting ─ granted ─► prefilling ─ accepted ─► fetching ─ done ─► decoding ─ finished ─► ending ─► ended
      │    ▲                 │  ▲  └─ done (prefilled on the decode worker) ─►┘
      │refused               │refused
      ▼    │ capacity        ▼  │ capacity
    awaiting credit        awaiting prefill

If a worker is lost or fails, the request goes back to `admitting` with its tokens so far; any other error ends it.
If the decode worker is lost while it decodes, or if a client resumes, the request is `attaching` first, since a worker
may still have the sequence.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

from gateway.orchestration.answer_actions import add_tokens, begin_answer, expect_report
from gateway.orchestration.credit_actions import ask_for_credit, queue_for_credit
from gateway.orchestration.ending_actions import (
    end_answered,
    end_cancelled,
    end_deadline,
    end_draining,
    end_full,
    end_or_wait_longer,
    end_unread,
)
from gateway.orchestration.prefill_actions import (
    ask_for_prefill,
    begin_prefill,
    fetch,
    note_fetched,
    note_prefix,
    queue_for_prefill,
)
from gateway.orchestration.recovery_actions import (
    begin_reattach,
    doubt_fetch,
    drop_reattach_leg,
    find_sequence,
    leave_stalled,
    resume_decoding,
    send_attach,
    start_over,
    try_again,
)
from gateway.orchestration.request_context import RequestContext
from gateway.orchestration.states import Occurrence, RequestEvent
from gateway.request.request_state import RequestState

Action = Callable[[RequestContext, Occurrence[Any]], RequestState | None]


class RequestTransition(NamedTuple):
    """One cell of the table: the request enters the first of `states`, then `action` runs.

    The action may lead on to another one of `states` by returning it, or to ENDED by raising BatonError or Diverged."""

    action: Action
    states: tuple[RequestState, ...]


def ignore(request: RequestContext, event: Occurrence[object]) -> None:
    """Do nothing."""


def _table() -> dict[tuple[RequestState, RequestEvent], RequestTransition]:
    s, e, to = RequestState, RequestEvent, _to
    retry = to(try_again, s.ADMITTING, s.AWAITING_CREDIT, s.ENDED)
    attach = (s.ATTACHING, s.ADMITTING, s.AWAITING_CREDIT, s.ENDED)
    wait = to(drop_reattach_leg, *attach)
    table = {(state, event): to(ignore, state) for state in s for event in e}
    for state in s:
        if state is s.ENDED:
            continue
        table[state, e.DEADLINE] = to(end_deadline, s.ENDED)
        table[state, e.CANCEL] = to(end_cancelled, s.ENDED)
        table[state, e.UNREAD] = to(end_unread, s.ENDED)
        table[state, e.GRACE_OVER] = to(end_draining, s.ENDED)
    # The attempt ends when a worker that takes part in it is lost.
    for state in (s.ADMITTING, s.AWAITING_PREFILL, s.PREFILLING, s.FETCHING, s.DECODING):
        for event in (e.DECODE_ENDED, e.DECODE_FAILED, e.DECODE_LOST):
            table[state, event] = retry
        table[state, e.DECODE_STALLED] = to(leave_stalled, *dict.fromkeys((state, *retry.states)))
    for state in (s.PREFILLING, s.FETCHING):
        table[state, e.PREFILL_STALLED] = to(leave_stalled, state, *retry.states)
        for event in (e.PREFILL_ENDED, e.PREFILL_FAILED, e.PREFILL_LOST):
            table[state, event] = retry
        table[state, e.DONE] = to(begin_answer, s.DECODING, s.ENDED)
    return table | {
        (s.AWAITING_CREDIT, e.RESUMED): to(find_sequence, *attach),
        (s.AWAITING_CREDIT, e.CAPACITY): to(ask_for_credit, s.ADMITTING, s.AWAITING_CREDIT, s.ENDED),
        (s.AWAITING_CREDIT, e.SILENCE): to(end_or_wait_longer, s.AWAITING_CREDIT, s.ENDED),
        (s.ADMITTING, e.GRANTED): to(begin_prefill, s.PREFILLING, s.AWAITING_PREFILL, s.AWAITING_CREDIT, s.ENDED),
        (s.ADMITTING, e.REFUSED): to(queue_for_credit, s.AWAITING_CREDIT, s.ENDED),
        (s.ADMITTING, e.SILENCE): retry,
        (s.AWAITING_PREFILL, e.CAPACITY): to(ask_for_prefill, s.PREFILLING, s.AWAITING_CREDIT, s.ENDED),
        (s.AWAITING_PREFILL, e.SILENCE): to(end_full, s.ENDED),
        (s.PREFILLING, e.ACCEPTED): to(fetch, s.FETCHING),
        (s.PREFILLING, e.REFUSED): to(queue_for_prefill, s.AWAITING_PREFILL, s.AWAITING_CREDIT, s.ENDED),
        (s.PREFILLING, e.SILENCE): retry,
        (s.PREFILLING, e.FETCHED): to(note_prefix, s.PREFILLING),
        (s.FETCHING, e.FETCHED): to(note_fetched, s.FETCHING),
        (s.DECODING, e.FETCHED): to(note_fetched, s.DECODING),
        (s.DECODING, e.DECODE_LOST): to(begin_reattach, *attach),
        (s.DECODING, e.PREFILL_LOST): to(doubt_fetch, s.DECODING),
        (s.DECODING, e.PREFILL_STALLED): to(doubt_fetch, s.DECODING),
        (s.DECODING, e.DOUBT_OVER): retry,
        (s.ATTACHING, e.REJOINED): to(send_attach, *attach),
        (s.ATTACHING, e.GRANTED): to(resume_decoding, s.DECODING),
        (s.ATTACHING, e.NOT_HERE): wait,
        (s.ATTACHING, e.REFUSED): wait,
        (s.ATTACHING, e.DECODE_ENDED): wait,
        (s.ATTACHING, e.DECODE_FAILED): wait,
        (s.ATTACHING, e.DECODE_LOST): wait,
        (s.ATTACHING, e.SILENCE): to(start_over, s.ADMITTING, s.AWAITING_CREDIT, s.ENDED),
        (s.DECODING, e.TOKENS): to(add_tokens, s.DECODING, s.ENDED),
        # All that the prefill worker still does is to give up its lease; if the KV does not arrive, the fetch fails.
        (s.DECODING, e.FINISHED): to(expect_report, s.ENDING, s.ENDED),
        (s.ENDING, e.DECODE_ENDED): to(end_answered, s.ENDED),
        (s.ENDING, e.DECODE_FAILED): to(end_answered, s.ENDED),
        (s.ENDING, e.DECODE_LOST): to(end_answered, s.ENDED),
        (s.ENDING, e.SILENCE): to(end_answered, s.ENDED),
        (s.ENDING, e.UNREAD): to(ignore, s.ENDING),
    }


def _to(action: Action, *states: RequestState) -> RequestTransition:
    return RequestTransition(action, states)


TABLE = _table()
