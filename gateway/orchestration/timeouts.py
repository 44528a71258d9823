"""The timeouts of a request: until when it waits for an event in each state, and what happens if none comes."""

import math
from collections.abc import Callable
from typing import NamedTuple

from gateway.attempts.answer_timeout import LATE_S, answer_timeout_s, gives_up
from gateway.attempts.reattach import ATTACH_WAIT_S
from gateway.orchestration.request_context import RequestContext
from gateway.orchestration.states import RequestEvent
from gateway.request.request_state import RequestState

_REPORT_S = 0.5  # how long a complete answer waits for the decode worker's report


class Timeout(NamedTuple):
    """The timeout of a state. A request also ends at its deadline, in every state.

    `due(request, since)` returns when the wait is over if it began at `since` (both time.monotonic()).
    `expire(request, late_s)` is called if no event has come by then, `late_s` afterwards: it returns the event that
    happens now, or None. If it returns None and the timeout `repeats`, the wait begins again."""

    due: Callable[[RequestContext, float], float]
    expire: Callable[[RequestContext, float], RequestEvent | None]
    repeats: bool = False


# ---- when ----


def next_queue_look(request: RequestContext, since: float) -> float:
    """Return when the request looks for a worker again without being called."""
    return request.queue_wait.wake_at


def answer_due(request: RequestContext, since: float) -> float:
    """Return until when the worker that was asked has to answer."""
    return since + answer_timeout_s(request.deadline - since)


def prefill_answer_due(request: RequestContext, since: float) -> float:
    """Return until when the prefill worker has to answer; a decode worker that prefills owes no answer."""
    return answer_due(request, since) if request.attempt.prefill_link is not None else math.inf


def doubt_or_lease_due(request: RequestContext, since: float) -> float:
    """Return when a doubtful fetch is given up, or when the lease is renewed; never once the KV is fetched."""
    return request.attempt.kv_fetch.due


def attach_due(request: RequestContext, since: float) -> float:
    """Return until when a worker has to answer Attach."""
    return since + ATTACH_WAIT_S


def report_due(request: RequestContext, since: float) -> float:
    """Return until when the answer waits for the decode worker's report."""
    return since + _REPORT_S


# ---- what then ----


def look_again(request: RequestContext, late_s: float) -> RequestEvent:
    """Return SILENCE if the request has waited for as long as it may, CAPACITY if it looks for a worker again."""
    return RequestEvent.SILENCE if request.queue_wait.is_over else RequestEvent.CAPACITY


def leave_silent_decode_worker(request: RequestContext, late_s: float) -> RequestEvent | None:
    """Return SILENCE if another decode worker could take the request from the one that does not answer."""
    silent, router = request.attempt.decode, request.router
    assert silent is not None  # it was asked for credit

    def has_other() -> bool:
        return router.has_worker("decode", exclude={silent.worker_id}, trusted_only=True)

    return RequestEvent.SILENCE if gives_up(silent.link, RequestState.ADMITTING, late_s, has_other) else None


def leave_silent_prefill_worker(request: RequestContext, late_s: float) -> RequestEvent | None:
    """Return SILENCE if another worker could read the prompt instead of the one that does not answer."""
    silent, router = request.attempt.prefilling_leg, request.router

    def has_other() -> bool:
        return router.may_prefill_locally or router.has_worker("prefill", exclude={silent.worker_id}, trusted_only=True)

    return RequestEvent.SILENCE if gives_up(silent.link, RequestState.PREFILLING, late_s, has_other) else None


def end_doubt_or_renew_lease(request: RequestContext, late_s: float) -> RequestEvent | None:
    """Return DOUBT_OVER if the source of the KV may be gone; otherwise renew the lease."""
    if request.attempt.kv_fetch.is_in_doubt:
        return RequestEvent.DOUBT_OVER
    request.attempt.renew_lease()
    return None


def end_attaching(request: RequestContext, late_s: float) -> RequestEvent | None:
    """Return SILENCE, unless this process did not run when the time ended: the answer may be unread."""
    return RequestEvent.SILENCE if late_s <= LATE_S else None


def end_without_report(request: RequestContext, late_s: float) -> RequestEvent:
    """Return SILENCE: the answer ends without the report."""
    return RequestEvent.SILENCE


TIMEOUTS: dict[RequestState, Timeout] = {
    RequestState.AWAITING_CREDIT: Timeout(next_queue_look, look_again),
    RequestState.ADMITTING: Timeout(answer_due, leave_silent_decode_worker, repeats=True),
    RequestState.AWAITING_PREFILL: Timeout(next_queue_look, look_again),
    RequestState.PREFILLING: Timeout(prefill_answer_due, leave_silent_prefill_worker, repeats=True),
    RequestState.FETCHING: Timeout(doubt_or_lease_due, end_doubt_or_renew_lease),
    RequestState.DECODING: Timeout(doubt_or_lease_due, end_doubt_or_renew_lease),
    RequestState.ATTACHING: Timeout(attach_due, end_attaching, repeats=True),
    RequestState.ENDING: Timeout(report_due, end_without_report),
}
