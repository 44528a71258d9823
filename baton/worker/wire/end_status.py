"""Name the status with which a leg ends: a google.rpc.Code, a stable reason, and a message."""

from typing import NamedTuple

from google.rpc import code_pb2

from baton import protocol
from baton.engine.core.request import Refusal, RequestEnded
from kvtransfer import errors
from kvtransfer.transfer.leases import LeaseEnding


class Status(NamedTuple):
    """Say how a leg ended. `code` is a google.rpc.Code number; 0 is ok."""

    code: int
    reason: str = ""
    message: str = ""
    retry_after_s: float = 0.0


OK = Status(code_pb2.OK)
CANCELLED = Status(code_pb2.CANCELLED, "CANCELLED", "cancelled")
DEADLINE = Status(code_pb2.DEADLINE_EXCEEDED, "DEADLINE_EXCEEDED", "the budget of this request is used up")
STREAM_LOST = Status(code_pb2.CANCELLED, "STREAM_LOST", "the session that it came through is lost")
NOBODY_CAME = Status(code_pb2.CANCELLED, "STREAM_LOST", "its stream was lost and not resumed")
ATTACHED = Status(code_pb2.ABORTED, protocol.ATTACHED, "another gateway has taken this request over")
LEASE_EXPIRED = Status(code_pb2.UNAVAILABLE, protocol.LEASE_EXPIRED, "the KV of this prompt was not fetched in time")
DRAINING = Status(code_pb2.UNAVAILABLE, protocol.DRAINING, "this worker is shutting down")

# By how a lease ends. One that was taken ends with OK: its taker's leg has reported it.
LEASE_OVER = {
    LeaseEnding.RELEASED: OK,
    LeaseEnding.CANCELLED: CANCELLED,
    LeaseEnding.EXPIRED: LEASE_EXPIRED,
}


def misplaced(command: str) -> Status:
    """Return the status for a command that the leg's state does not allow."""
    return Status(code_pb2.FAILED_PRECONDITION, "BAD_COMMAND", f"{command} came when this key had no place for it")


# The first class that matches counts, so subclasses come before their bases.
_KV_ERRORS = (
    (errors.DigestMismatch, code_pb2.DATA_LOSS, protocol.DIGEST_MISMATCH),
    (errors.LayoutMismatch, code_pb2.FAILED_PRECONDITION, protocol.LAYOUT_MISMATCH),
    (errors.TicketRefused, code_pb2.FAILED_PRECONDITION, protocol.TICKET_REFUSED),
    (errors.LeaseExpired, code_pb2.UNAVAILABLE, protocol.LEASE_EXPIRED),
    (errors.TransferTimedOut, code_pb2.DEADLINE_EXCEEDED, "DEADLINE_EXCEEDED"),
    (errors.KVError, code_pb2.UNAVAILABLE, protocol.KV_TRANSFER_FAILED),
)


def of_exception(error: BaseException) -> Status:
    """Return the status of a leg whose command or fetch raised `error`. A ValueError is a fault of the command."""
    for kind, code, reason in _KV_ERRORS:
        if isinstance(error, kind):
            return Status(code, reason, str(error) or reason)
    if isinstance(error, Refusal):
        message = f"refused: {error.reason}"
        return Status(code_pb2.RESOURCE_EXHAUSTED, error.reason.upper(), message, error.retry_after_s)
    if isinstance(error, TimeoutError):
        return DEADLINE
    if isinstance(error, ValueError):
        return Status(code_pb2.INVALID_ARGUMENT, "BAD_COMMAND", str(error))
    return internal(error)


def internal(error: BaseException) -> Status:
    """Return the status for an `error` that is a fault of this worker."""
    return Status(code_pb2.INTERNAL, "INTERNAL", f"{type(error).__name__}: {error}")


def of_engine(ended: RequestEnded) -> Status:
    """Return the status of a leg that the engine has ended."""
    if not ended.error:
        return OK
    if ended.error == "cancelled":
        return CANCELLED
    if ended.error == "deadline":
        return DEADLINE
    if ended.error == "constraint":
        return Status(code_pb2.INVALID_ARGUMENT, "CONSTRAINT", ended.message)
    reason = protocol.STEP_FAILED if ended.error == "failed_together" else protocol.ENGINE_FAILED
    return Status(code_pb2.INTERNAL, reason, ended.message or ended.error)
