"""Turn a call for embeddings into validated prompts, or raise InvalidRequest that names the field."""

from collections.abc import Iterable, Iterator

from baton.service.errors import InvalidRequest
from baton.v1 import inference_pb2 as pb
from baton.v1 import worker_pb2
from gateway.config.served_model import ServedModel
from gateway.request.prompt_batch import PromptBatch, shared_request, validate_all
from gateway.request.validation import check_model, check_size


def check_embed(
    request: pb.EmbedRequest, served: ServedModel, hidden_size: int, tenant: str, max_priority: int, request_id: str
) -> PromptBatch:
    """Return the validated prompts and their pooling. `hidden_size`: the model's, or 0 if it is not known. Raises
    InvalidRequest, NotFound."""
    check_size(request, "inputs")
    check_model(request.model, served)
    num_inputs, most = len(request.inputs), served.limits.inputs
    if not 1 <= num_inputs <= most:
        raise InvalidRequest("inputs", f"has {num_inputs} texts, 1 to {most} are allowed")
    if request.pooling not in pb.Pooling.values():
        raise InvalidRequest("pooling", "is not known here")
    dimensions = request.dimensions
    if request.HasField("dimensions") and not 1 <= dimensions <= (hidden_size or dimensions):
        raise InvalidRequest("dimensions", f"must be 1 to {hidden_size}" if hidden_size else "must be at least 1")
    requests = _requests(shared_request(request), request.inputs)
    prompts = validate_all(requests, _field_path, served, tenant, max_priority, request_id)
    pooling = worker_pb2.PoolingSpec(
        pooling=request.pooling or pb.POOLING_LAST,
        normalize=request.normalize or not request.HasField("normalize"),
        dimensions=dimensions,
    )
    return PromptBatch(prompts, pooling, _field_path)


def _requests(shared: pb.GenerateRequest, inputs: Iterable[pb.EmbedInput]) -> Iterator[pb.GenerateRequest]:
    """Yield the request of each input."""
    for given in inputs:
        request = pb.GenerateRequest()
        request.CopyFrom(shared)
        kind = given.WhichOneof("input")
        if kind == "text":
            request.text = given.text
        elif kind is not None:
            request.token_ids.CopyFrom(given.token_ids)
        yield request


def _field_path(index: int, field: str) -> str:
    return f"inputs[{index}].{field}"
