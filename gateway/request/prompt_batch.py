"""The prompts of one call that are read and not answered."""

from collections.abc import Callable, Iterable
from typing import NamedTuple

from baton.service.errors import InvalidRequest
from baton.v1 import inference_pb2 as pb
from baton.v1 import worker_pb2
from gateway.config.served_model import ServedModel
from gateway.request.validation import ValidatedRequest, validate

_OF_THE_CALL = ("request_id", "slo_class")  # fields that the call has under the same name


class PromptBatch(NamedTuple):
    """The prompts of a call and the pooling of each. `field_path(index, field)` names a prompt's field as the call
    does."""

    prompts: list[ValidatedRequest]
    pooling: worker_pb2.PoolingSpec
    field_path: Callable[[int, str], str]

    def error_of(self, index: int, error: InvalidRequest) -> InvalidRequest:
        """Return the error of one prompt as an error of the call, which names the call's field."""
        return in_place(error, self.field_path(index, error.field or ""))


def shared_request(call: pb.EmbedRequest | pb.ScoreRequest) -> pb.GenerateRequest:
    """Return what all prompts of a call have in common, as a request without a prompt."""
    shared = pb.GenerateRequest(request_id=call.request_id, slo_class=call.slo_class, model=call.model)
    if call.HasField("priority"):
        shared.priority = call.priority
    return shared


def validate_all(
    requests: Iterable[pb.GenerateRequest],
    field_path: Callable[[int, str], str],
    served: ServedModel,
    tenant: str,
    max_priority: int,
    request_id: str,
) -> list[ValidatedRequest]:
    """Return the validated prompts of a call; each request is read before the next is asked for. Raises InvalidRequest
    that names the call's field, NotFound."""
    prompts: list[ValidatedRequest] = []
    for index, request in enumerate(requests):
        try:
            prompts.append(validate(request, served, tenant, max_priority, request_id))
        except InvalidRequest as error:
            if error.field in _OF_THE_CALL:
                raise
            raise in_place(error, field_path(index, error.field or "")) from None
    return prompts


def in_place(error: InvalidRequest, field: str) -> InvalidRequest:
    """Return the same error for another field."""
    return type(error)(field, error.message.removeprefix(f"{error.field}: "))
