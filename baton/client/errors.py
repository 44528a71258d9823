"""Read the error of a call: its status, and the google.rpc details that a gateway adds."""

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
    """A failed call. `code()` and `details()` are as in gRPC; `reason` is UPPER_SNAKE and stable; `field` names the
    wrong field; `retry_after_s` is when to try again, if the gateway says so; `request_id` is the request's id in the
    gateway's log, "" if it did not get so far."""

    def __init__(self, code: grpc.StatusCode, message: str, trailing_metadata: Metadata = ()):
        super().__init__(f"{code.name}: {message}")
        self.message = message
        self.reason, self.field, self.retry_after_s, self.request_id = _read_details(trailing_metadata)
        self._code, self._trailing_metadata = code, trailing_metadata

    def __reduce__(self) -> tuple[type[Self], tuple[grpc.StatusCode, str, Metadata]]:
        # By default an exception is unpickled from `args`, the one line, so a process pool that transfers an error
        # would hang or break.
        return type(self), (self._code, self.message, self._trailing_metadata)

    def code(self) -> grpc.StatusCode:
        """Return the gRPC status code."""
        return self._code

    def details(self) -> str:
        """Return one line for people."""
        return self.message

    def trailing_metadata(self) -> Any:
        """Return the trailing metadata of the call."""
        return self._trailing_metadata


def read_call_error(error: grpc.RpcError) -> CallError:
    """Return the CallError for an error that gRPC raised."""
    call = error if isinstance(error, (grpc.Call, grpc.aio.AioRpcError)) else None
    if call is None:  # raised by a closed channel
        return CallError(grpc.StatusCode.UNKNOWN, str(error))
    metadata = tuple((str(key), value) for key, value in call.trailing_metadata() or ())
    return CallError(call.code(), call.details() or call.code().name, metadata)


def _read_details(metadata: Metadata) -> tuple[str, str | None, float | None, str]:
    """Return reason, field, delay (s) and id from ErrorInfo, BadRequest, RetryInfo and RequestInfo. They are parsed
    without their packages, since the numbers of their fields never change. The peer's bytes are not trusted."""
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
    """Yield the length-delimited values (texts, bytes, messages) of one field of a serialized message."""
    for field in UnknownFieldSet(Empty.FromString(message)):
        if field.field_number == number and isinstance(field.data, bytes):
            yield field.data
