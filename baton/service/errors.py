"""Map errors to what the caller sees, a gRPC status with google.rpc details, and back."""

from __future__ import annotations

import math
from typing import NoReturn

import grpc
from google.rpc import code_pb2, error_details_pb2, status_pb2

DOMAIN = "baton"
_DETAILS_KEY = "grpc-status-details-bin"
_PUSHBACK_KEY = "grpc-retry-pushback-ms"  # read by gRPC's own retries, which do not know RetryInfo
_NO_RETRY = "-1"
# In UTF-8. Clients accept 8 KiB of metadata; percent-encoding turns a byte into three, and the details hold the message
# once or twice more, in base64.
_MAX_MESSAGE_BYTES = 1000


class BatonError(Exception):
    """An error that ends a call. `reason` is UPPER_SNAKE and stable; `message` is one line for people; `request_id` is
    set as soon as the request is known."""

    code = grpc.StatusCode.INTERNAL
    reason = "INTERNAL"

    def __init__(
        self,
        message: str,
        *,
        reason: str | None = None,
        field: str | None = None,
        retry_after_s: float | None = None,
        code: grpc.StatusCode | None = None,
    ):
        super().__init__(message)
        self.message = message
        self.request_id = ""
        self.field = field
        self.retry_after_s = retry_after_s
        self.reason = reason or type(self).reason
        self.code = code or type(self).code


class InvalidRequest(BatonError):
    """A field of the request is not acceptable; sending it again cannot help."""

    code, reason = grpc.StatusCode.INVALID_ARGUMENT, "INVALID_REQUEST"

    def __init__(self, field: str, message: str):
        super().__init__(message if message.startswith(field) else f"{field}: {message}", field=field)


class ContextLengthExceeded(InvalidRequest):
    """A prompt is too long, alone or together with max_tokens. Clients shorten their prompt when they read this reason,
    or when the message has the words of OpenAI's API ("maximum context length") or Anthropic's ("prompt is too long: 9
    tokens > 8")."""

    reason = "CONTEXT_LENGTH_EXCEEDED"


class NotFound(BatonError):
    code, reason = grpc.StatusCode.NOT_FOUND, "NOT_FOUND"


class Unauthenticated(BatonError):
    """The caller has shown no valid credential."""

    code, reason = grpc.StatusCode.UNAUTHENTICATED, "UNAUTHENTICATED"


class PermissionDenied(BatonError):
    """The caller is known and has no right to do this."""

    code, reason = grpc.StatusCode.PERMISSION_DENIED, "PERMISSION_DENIED"


class AlreadyExists(BatonError):
    code, reason = grpc.StatusCode.ALREADY_EXISTS, "ALREADY_EXISTS"


class Overloaded(BatonError):
    """The server is overloaded; the caller may try again after `retry_after_s`."""

    code, reason = grpc.StatusCode.RESOURCE_EXHAUSTED, "OVERLOADED"

    def __init__(self, message: str, retry_after_s: float, reason: str | None = None):
        super().__init__(message, retry_after_s=retry_after_s, reason=reason)


class Unavailable(BatonError):
    code, reason = grpc.StatusCode.UNAVAILABLE, "UNAVAILABLE"

    def __init__(self, message: str, retry_after_s: float | None = None, reason: str | None = None):
        super().__init__(message, retry_after_s=retry_after_s, reason=reason)


class NoWorker(Unavailable):
    """No worker can serve this request now; one may be back soon."""

    reason = "NO_WORKER"

    def __init__(self, message: str):
        super().__init__(message, retry_after_s=1.0)


class DeadlineExceeded(BatonError):
    code, reason = grpc.StatusCode.DEADLINE_EXCEEDED, "DEADLINE_EXCEEDED"


class Cancelled(BatonError):
    code, reason = grpc.StatusCode.CANCELLED, "CANCELLED"


class FailedPrecondition(BatonError):
    """This model, worker or gateway cannot do that with the settings it was started with; a retry cannot help."""

    code, reason = grpc.StatusCode.FAILED_PRECONDITION, "FAILED_PRECONDITION"


class DataLoss(BatonError):
    code, reason = grpc.StatusCode.DATA_LOSS, "DATA_LOSS"


class Internal(BatonError):
    """A bug in Baton."""


_CLASSES: dict[grpc.StatusCode, type[BatonError]] = {
    kind.code: kind
    for kind in (
        InvalidRequest,
        NotFound,
        Unauthenticated,
        PermissionDenied,
        AlreadyExists,
        Overloaded,
        Unavailable,
        DeadlineExceeded,
        Cancelled,
        FailedPrecondition,
        DataLoss,
        Internal,
    )
}


async def abort(context: grpc.aio.ServicerContext, error: BatonError) -> NoReturn:
    """End the call with the error's code and google.rpc details (ErrorInfo, RequestInfo, BadRequest, RetryInfo). The
    retry delay is also set in the metadata that gRPC's own retries read; for RESOURCE_EXHAUSTED without a delay it
    forbids them."""
    status = to_status(error)
    metadata: list[tuple[str, str | bytes]] = [(_DETAILS_KEY, status.SerializeToString())]
    if error.retry_after_s is not None:
        metadata.append((_PUSHBACK_KEY, str(math.ceil(1e3 * error.retry_after_s))))
    elif error.code is grpc.StatusCode.RESOURCE_EXHAUSTED:
        metadata.append((_PUSHBACK_KEY, _NO_RETRY))
    await context.abort(error.code, status.message, trailing_metadata=tuple(metadata))
    raise AssertionError("abort returned")


def to_status(error: BatonError) -> status_pb2.Status:
    """Return the google.rpc.Status of an error."""
    status = status_pb2.Status(code=error.code.value[0], message=_shortened(error.message))
    status.details.add().Pack(error_details_pb2.ErrorInfo(reason=error.reason, domain=DOMAIN))
    if error.request_id:
        status.details.add().Pack(error_details_pb2.RequestInfo(request_id=error.request_id))
    if error.field is not None:
        bad_request = error_details_pb2.BadRequest()
        bad_request.field_violations.add(field=error.field, description=status.message)
        status.details.add().Pack(bad_request)
    if error.retry_after_s is not None:
        retry = error_details_pb2.RetryInfo()
        retry.retry_delay.FromNanoseconds(round(error.retry_after_s * 1e9))
        status.details.add().Pack(retry)
    return status


def _shortened(message: str) -> str:
    return message.encode(errors="replace")[:_MAX_MESSAGE_BYTES].decode(errors="ignore")


def from_code(
    code: grpc.StatusCode | int,
    message: str,
    *,
    reason: str | None = None,
    field: str | None = None,
) -> BatonError:
    """Return a BatonError of the class for `code` (a StatusCode or a google.rpc.Code number)."""
    if isinstance(code, int):
        known = code in code_pb2.Code.values() and code != code_pb2.OK
        code = grpc.StatusCode[code_pb2.Code.Name(code)] if known else grpc.StatusCode.INTERNAL
    kind = _CLASSES.get(code, BatonError)
    error = kind.__new__(kind)
    reason = reason or (code.name if kind is BatonError else kind.reason)
    BatonError.__init__(error, message, reason=reason, field=field, code=code)
    return error
