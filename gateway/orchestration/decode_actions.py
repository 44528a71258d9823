"""Actions while tokens come, and those that end a request."""

from baton.service.errors import Cancelled, DeadlineExceeded, Overloaded, Unavailable
from baton.v1 import worker_pb2 as pb
from gateway.link.mailbox import Lost, Overflow, Tokens
from gateway.orchestration.request_context import RequestContext
from gateway.orchestration.states import Occurrence
from gateway.request.request_state import RequestState


def ignore(request: RequestContext, occurred: Occurrence[object]) -> None:
    """Do nothing."""


def take_tokens(request: RequestContext, occurred: Occurrence[Tokens]) -> None:
    """Add tokens to the answer. Raises Diverged, InvalidRequest."""
    tokens = occurred.message
    request.attempt.has_stepped = True
    request.answer.push(tokens.choice, tokens.first_index, tokens.token_ids, tokens.logprobs, tokens.finish_reason)


def expect_report(request: RequestContext, occurred: Occurrence[None]) -> RequestState | None:
    """Wait for what the decode worker has measured, if it has decoded anything."""
    decode = request.attempt.decode
    if not request.attempt.is_decoding:
        decode.close(is_answered=True)
        return RequestState.ENDED  # the first tokens were the last
    if request.answer.ended_here:
        decode.finish()
    return None


def end_answered(request: RequestContext, occurred: Occurrence[pb.Ended | Lost | None]) -> None:
    """End with an answer; a report, if there is one, goes into the record."""
    if isinstance(occurred.message, pb.Ended):
        request.record.measured.decode = occurred.message.decode
        request.attempt.decode.note_success()


def end_unread(request: RequestContext, occurred: Occurrence[Overflow | None]) -> None:
    """Raises Overloaded."""
    raise Overloaded("too many tokens of this answer are unread", 0.0, reason="SLOW_READER")


def end_deadline(request: RequestContext, occurred: Occurrence[None]) -> None:
    """Raises DeadlineExceeded."""
    raise DeadlineExceeded(f"the deadline passed while {occurred.before.value}")


def end_draining(request: RequestContext, occurred: Occurrence[None]) -> None:
    """Raises Unavailable, which tells the client how to continue elsewhere."""
    message = "this gateway is shutting down: send the same request with the returned seed and resume_from"
    raise Unavailable(message, 0.0, reason="DRAINING")


def end_cancelled(request: RequestContext, occurred: Occurrence[None]) -> None:
    """Raises Cancelled."""
    raise Cancelled("the client went away")
