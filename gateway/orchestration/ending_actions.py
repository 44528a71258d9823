"""Actions that end a request."""

from baton.service.errors import Cancelled, DeadlineExceeded, Overloaded, Unavailable
from baton.v1 import worker_pb2 as pb
from gateway.link.mailbox import Lost, Overflow
from gateway.orchestration.request_context import RequestContext
from gateway.orchestration.states import Occurrence


def end_answered(request: RequestContext, event: Occurrence[pb.Ended | Lost | None]) -> None:
    """End the request with its answer; record the decode worker's report if it came."""
    if isinstance(event.payload, pb.Ended):
        request.record.measured.decode = event.payload.decode
        request.attempt.decode.note_success()


def end_or_wait_longer(request: RequestContext, event: Occurrence[None]) -> None:
    """Wait longer if no worker serves and one is starting. Raises NoWorker if no worker came, and Overloaded if all
    workers are full."""
    router, failures = request.router, request.failures
    lacks_worker = failures.awaits_worker or not router.has_worker("decode")
    if not (lacks_worker and router.expects_worker() and request.queue_wait.wait_longer(router.max_start_wait_s)):
        failures.end_wait()
        end_full(request, event)


def end_full(request: RequestContext, event: Occurrence[None]) -> None:
    """End a request that has waited in a queue for too long. Raises Overloaded."""
    request.queue_wait.time_out()


def end_unread(request: RequestContext, event: Occurrence[Overflow | None]) -> None:
    """End a request whose client does not read its tokens. Raises Overloaded."""
    raise Overloaded("too many tokens of this answer are unread", 0.0, reason="SLOW_READER")


def end_deadline(request: RequestContext, event: Occurrence[None]) -> None:
    """End a request at its deadline. Raises DeadlineExceeded."""
    raise DeadlineExceeded(f"the deadline passed while {event.before.value}")


def end_draining(request: RequestContext, event: Occurrence[None]) -> None:
    """End a request because this gateway shuts down. Raises Unavailable, which tells the client how to continue on
    another gateway."""
    message = "this gateway is shutting down: send the same request with the returned seed and resume_from"
    raise Unavailable(message, 0.0, reason="DRAINING")


def end_cancelled(request: RequestContext, event: Occurrence[None]) -> None:
    """End a request whose client went away. Raises Cancelled."""
    raise Cancelled("the client went away")
