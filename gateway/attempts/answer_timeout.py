"""Bound the time that a worker may take to answer Admit or Prefill."""

from collections.abc import Callable

from gateway.link.worker_link import WorkerLink
from gateway.request.request_state import RequestState

# Workers answer Admit and Prefill from their ledger, without delay. They get a quarter of the time that is left: after
# two workers that do not answer, a client with a deadline of 3 s still has more than a second. A worker that is silent
# for longer than _MOST_ANSWER_S loses its session.
_ANSWER_SHARE, _LEAST_ANSWER_S, _MOST_ANSWER_S = 0.25, 0.25, 2.5
# A wait that ends this much too late shows that this process did not run: the answer may have come, and be unread.
LATE_S = 0.1


def answer_timeout_s(left_s: float) -> float:
    """Return how many seconds a worker may take to answer Admit or Prefill when the deadline is `left_s` away."""
    return min(max(_ANSWER_SHARE * left_s, _LEAST_ANSWER_S), _MOST_ANSWER_S)


def gives_up(link: WorkerLink, phase: RequestState, late_s: float, has_other: Callable[[], bool]) -> bool:
    """Return whether to leave a worker that has not answered within its time, which ended `late_s` ago.

    It is left if `has_other()` says that another worker could take the request. Otherwise its silence is counted as a
    failure, and it gets its time again, as it may still answer. If this process did not run when the time ended
    (LATE_S), the worker gets its time again too."""
    if late_s > LATE_S:
        return False
    if has_other():
        return True
    link.note_failure(f"silence while {phase.value}")
    return False
