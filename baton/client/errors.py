"""Read what a call failed with: its status, and the google.rpc details that a gateway adds."""

from collections.abc import Iterator
from typing import Any, Self

import grpc
from google.protobuf.duration_pb2 import Duration
from google.protobuf.empty_pb2 import Empty
from google.protobuf.message import DecodeError
from google.protobuf.unknown_fields import UnknownFieldSet

_DETAILS_KEY = "grpc-status-details-bin"
Metadata = tuple[tuple[str, str | bytes], ...]


class CallError(grpc.RpcError):
    """A call that failed. `code()` and `details()` as gRPC has them; `reason` is UPPER_SNAKE and stable; `field` is the
    one that is wrong; `retry_after_s` is when to come back, where the gateway says so; `request_id` is what its log
    calls the request, "" where it did not get so far."""

    def __init__(self, code: grpc.StatusCode, message: str, trailing_metadata: Metadata = ()):
        super().__init__(f"{code.name}: {message}")
        self.message = message
        self.reason, self.field, self.retry_after_s, self.request_id = _read_details(trailing_metadata)
        self._code, self._trailing_metadata = code, trailing_metadata

    def __reduce__(self) -> tuple[type[Self], tuple[grpc.StatusCode, str, Metadata]]:
        # An exception is made again of its `args`, the one line: pools of processes, to which an error is sent, hang or
        # break.
        return type(self), (self._code, self.message, self._trailing_metadata)

    def code(self) -> grpc.StatusCode:
        """Return the status."""
        return self._code

    def details(self) -> str:
        """Return one line for people."""
        return self.message

    def trailing_metadata(self) -> Any:
        """Return what came behind the answer."""
        return self._trailing_metadata


def read_call_error(error: grpc.RpcError) -> CallError:
    """Return what gRPC raised, read."""
    call = error if isinstance(error, (grpc.Call, grpc.aio.AioRpcError)) else None
    if call is None:  # of a channel that was closed
        return CallError(grpc.StatusCode.UNKNOWN, str(error))
    metadata = tuple((str(key), value) for key, value in call.trailing_metadata() or ())
    return CallError(call.code(), call.details() or call.code().name, metadata)


def _read_details(metadata: Metadata) -> tuple[str, str | None, float | None, str]:
    """Return reason, field, delay and id of ErrorInfo, BadRequest, RetryInfo and RequestInfo. Their packages are
    not needed: the numbers of their fields never change. A peer's bytes are not trusted."""
    reason, field, retry_after_s, request_id = "", None, None, ""
    packed = next((value for key, value in metadata if key == _DETAILS_KEY and isinstance(value, bytes)), b"")
    try:
        for detail in _fields(packed, 3):
            kind = b"".join(_fields(detail, 1)).rpartition(b".")[2]
            value = b"".join(_fields(detail, 2))
            if kind == b"ErrorInfo":
                reason = b"".join(_fields(value, 1)).decode()
            elif kind == b"RequestInfo":
                request_id = b"".join(_fields(value, 1)).decode()
            elif kind == b"BadRequest":
                violations = [b"".join(_fields(each, 1)).decode() for each in _fields(value, 1)]
                field = violations[0] if violations else None
            elif kind == b"RetryInfo":
                for delay in _fields(value, 1):
                    duration = Duration.FromString(delay)
                    retry_after_s = duration.seconds + duration.nanos / 1e9
    except (DecodeError, UnicodeDecodeError):
        return "", None, None, ""
    return reason, field, retry_after_s, request_id


def _fields(message: bytes, number: int) -> Iterator[bytes]:
    """Yield the texts, bytes and messages of one field of a serialized message."""
    for field in UnknownFieldSet(Empty.FromString(message)):
        if field.field_number == number and isinstance(field.data, bytes):
            yield field.data
