"""The prompts of one call that are read and not answered."""

from collections.abc import Callable
from typing import NamedTuple

from baton.service.errors import InvalidRequest
from baton.v1 import worker_pb2
from gateway.request.validation import ValidatedRequest


class PromptBatch(NamedTuple):
    """The prompts of a call and the pooling of each. `place_of(index, field)` names a prompt's field as the call
    does."""

    prompts: list[ValidatedRequest]
    pooling: worker_pb2.PoolingSpec
    place_of: Callable[[int, str], str]

    def error_of(self, index: int, error: InvalidRequest) -> InvalidRequest:
        """Return the error of one prompt as an error of the call, which names the call's field."""
        return in_place(error, self.place_of(index, error.field or ""))


def in_place(error: InvalidRequest, place: str) -> InvalidRequest:
    """Return the same error for another field."""
    return type(error)(place, error.message.removeprefix(f"{error.field}: "))
