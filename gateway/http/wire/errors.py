"""Errors in the forms of OpenAI's and Anthropic's APIs: a status, a type, the field of the client's request, and when
to retry."""

import math
from collections.abc import Mapping

import grpc

from baton.service.errors import BatonError, InvalidRequest

Code = grpc.StatusCode

_STATUSES = {
    Code.INVALID_ARGUMENT: 400,
    Code.FAILED_PRECONDITION: 400,
    Code.UNAUTHENTICATED: 401,
    Code.PERMISSION_DENIED: 403,
    Code.NOT_FOUND: 404,
    Code.ALREADY_EXISTS: 409,
    Code.RESOURCE_EXHAUSTED: 429,
    Code.CANCELLED: 499,
    Code.UNAVAILABLE: 503,
    Code.DEADLINE_EXCEEDED: 504,
}  # 500 for others
# Reasons for which HTTP has a status of its own, and gRPC does not.
_STATUSES_OF_REASONS = {
    "METHOD_NOT_ALLOWED": 405,
    "MESSAGE_LATE": 408,
    "BODY_TOO_LARGE": 413,
    "NOT_JSON": 415,
    "UNKNOWN_HOST": 421,
    "POISON": 422,  # clients do not retry it, as they would a 409 or a 500
    "HEAD_TOO_LARGE": 431,
}
_TYPES = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    429: "rate_limit_error",
}

# Types of Anthropic's API that differ from OpenAI's.
_ANTHROPIC_TYPES = {413: "request_too_large", 500: "api_error", 503: "overloaded_error", 504: "timeout_error"}


class BadCall(InvalidRequest):
    """The head or the body of a call is not acceptable for a reason that only HTTP has, which usually has its own
    status."""

    def __init__(self, field: str, message: str, reason: str):
        super().__init__(field, message)
        self.reason = reason


class ThreadRefused(InvalidRequest):
    """The client asks to store a conversation of Anthropic's API, or to continue a stored one."""

    def __init__(self) -> None:
        super().__init__("thread", "is not supported here: nothing is stored, so messages have the whole conversation")


def status_of(error: BatonError) -> int:
    """Return the HTTP status of an error."""
    return _STATUSES_OF_REASONS.get(error.reason) or _STATUSES.get(error.code, 500)


def to_json(error: BatonError, names: Mapping[str, str]) -> dict:
    """Return the body in OpenAI's form. `names`: the client's names for fields of baton.v1, by path."""
    status = status_of(error)
    kind = _TYPES.get(status) or ("invalid_request_error" if status < 500 else "server_error")
    message, param = error.message, None
    if error.field is not None:
        param = rename(error.field, names)
        if message.startswith(error.field):
            message = param + message.removeprefix(error.field)
    return {"error": {"message": message, "type": kind, "param": param, "code": error.reason.lower()}}


def to_anthropic(error: BatonError, names: Mapping[str, str]) -> dict:
    """Return the body in Anthropic's form. For a thread it has details by which clients that run tools continue without
    one."""
    openai_error = to_json(error, names)["error"]
    body = {"type": _ANTHROPIC_TYPES.get(status_of(error), openai_error["type"]), "message": openai_error["message"]}
    if isinstance(error, ThreadRefused):
        body["details"] = {"error_code": "thread_unsupported_request", "unsupported": ["thread"]}
    return {"type": "error", "error": body}


def rename(path: str, names: Mapping[str, str]) -> str:
    """Return the client's name for a field of baton.v1: "messages[0].role" for "messages.messages[0].role"."""
    known = [each for each in names if path == each or path.startswith((f"{each}.", f"{each}["))]
    if not known:
        return path
    longest = max(known, key=len)
    return names[longest] + path.removeprefix(longest)


def headers_of(error: BatonError) -> list[tuple[bytes, bytes]]:
    """Return the headers of an error: which credentials to show, when to retry, or not to retry."""
    if error.code is Code.UNAUTHENTICATED:
        return [(b"www-authenticate", b"Bearer")]
    if status_of(error) == 504:
        return [(b"x-should-retry", b"false")]  # OpenAI's and Anthropic's clients would retry it twice
    if error.retry_after_s is None:
        return []
    return [
        (b"retry-after", b"%d" % math.ceil(error.retry_after_s)),  # HTTP has whole seconds
        (b"retry-after-ms", b"%d" % math.ceil(1e3 * error.retry_after_s)),  # OpenAI's clients look here first
    ]
