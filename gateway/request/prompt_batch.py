"""Prompts of one call that are read and not answered."""

from collections.abc import Callable
from typing import NamedTuple

from baton.service.errors import InvalidRequest
from baton.v1 import worker_pb2
from gateway.request.validation import ValidatedRequest


class PromptBatch(NamedTuple):
    """One prompt or more, and what is wanted of each. `place_of(index, field)`: the call's word for a field of one."""

    prompts: list[ValidatedRequest]
    pooling: worker_pb2.PoolingSpec
    place_of: Callable[[int, str], str]

    def error_of(self, index: int, error: InvalidRequest) -> InvalidRequest:
        """Return an error of one prompt as that of the call."""
        return in_place(error, self.place_of(index, error.field or ""))


def in_place(error: InvalidRequest, place: str) -> InvalidRequest:
    """Return the same error of another field."""
    return type(error)(place, error.message.removeprefix(f"{error.field}: "))
