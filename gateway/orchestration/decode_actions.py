"""Actions that run while tokens arrive, and actions that end a request."""

from baton.service.errors import Cancelled, DeadlineExceeded, Overloaded, Unavailable
from baton.v1 import worker_pb2 as pb
from gateway.link.mailbox import Lost, Overflow, Tokens
from gateway.orchestration.request_context import RequestContext
from gateway.orchestration.states import Occurrence
from gateway.request.request_state import RequestState


def ignore(request: RequestContext, event: Occurrence[object]) -> None:
    """Do nothing."""


def take_tokens(request: RequestContext, event: Occurrence[Tokens]) -> None:
    """Add tokens to the answer. Raises Diverged and InvalidRequest."""
    tokens = event.payload
    request.attempt.has_stepped = True
    request.answer.push(tokens.choice, tokens.first_index, tokens.token_ids, tokens.logprobs, tokens.finish_reason)


def expect_report(request: RequestContext, event: Occurrence[None]) -> RequestState | None:
    """Wait for the decode worker's report of what it measured, or end the request if it decoded nothing."""
    decode = request.attempt.decode
    if not request.attempt.is_decoding:
        decode.close(is_answered=True)
        return RequestState.ENDED  # the first tokens were the last
    if request.answer.ended_here:
        decode.finish()
    return None


def end_answered(request: RequestContext, event: Occurrence[pb.Ended | Lost | None]) -> None:
    """End the request with its answer; record the decode worker's report if it came."""
    if isinstance(event.payload, pb.Ended):
        request.record.measured.decode = event.payload.decode
        request.attempt.decode.note_success()


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
