"""Turn a call for scores into validated prompts with the wording that Qwen3-Reranker was trained on: a conversation
that asks for yes or no."""

import math
from collections.abc import Iterable, Iterator, Sequence

from baton.service.errors import InvalidRequest
from baton.v1 import inference_pb2 as pb
from baton.v1 import worker_pb2
from gateway.config.served_model import ServedModel
from gateway.request.messages import WITHOUT_THINKING
from gateway.request.prompt_batch import PromptBatch, shared_request, validate_all
from gateway.request.validation import MAX_REQUEST_BYTES, check_model, check_size

LABELS = ("yes", "no")
_MAX_CHARACTERS = 4 * MAX_REQUEST_BYTES  # in all prompts of a call: each contains the query
_SYSTEM = (
    "Judge whether the Document meets the requirements based on the Query and the Instruct provided. "
    'Note that the answer can only be "yes" or "no".'
)
_INSTRUCTION = "Given a web search query, retrieve relevant passages that answer the query"


def check_score(
    request: pb.ScoreRequest,
    served: ServedModel,
    label_ids: Sequence[int],
    tenant: str,
    max_priority: int,
    request_id: str,
) -> PromptBatch:
    """Return a prompt for each document; `label_ids` are the tokens of LABELS. Raises InvalidRequest, NotFound."""
    check_size(request, "documents")
    check_model(request.model, served)
    if not request.query:
        raise InvalidRequest("query", "is empty")
    num_documents, most = len(request.documents), served.limits.inputs
    if not 1 <= num_documents <= most:
        raise InvalidRequest("documents", f"has {num_documents} texts, 1 to {most} are allowed")
    head = f"<Instruct>: {request.instruction or _INSTRUCTION}\n<Query>: {request.query}\n<Document>: "
    _check_length(head, request.documents)
    requests = _requests(shared_request(request), head, request.documents)
    prompts = validate_all(requests, _field_path, served, tenant, max_priority, request_id)
    return PromptBatch(prompts, worker_pb2.PoolingSpec(label_token_ids=label_ids), _field_path)


def _requests(shared: pb.GenerateRequest, head: str, documents: Iterable[str]) -> Iterator[pb.GenerateRequest]:
    """Yield the request of each document: the same message each time, which is read before it is changed."""
    shared.messages.chat_template_kwargs = WITHOUT_THINKING
    shared.messages.messages.add(role="system", content=_SYSTEM)
    user = shared.messages.messages.add(role="user")
    for index, document in enumerate(documents):
        if not document:
            raise InvalidRequest(f"documents[{index}]", "is empty")
        user.content = head + document
        yield shared


def _check_length(head: str, documents: Sequence[str]) -> None:
    """Raise InvalidRequest if `head` before each of the documents makes too much text to keep while the call waits."""
    num_characters = len(documents) * len(head) + sum(map(len, documents))
    if num_characters > _MAX_CHARACTERS:
        position = f"stands before each of {len(documents)} documents, {num_characters} characters in all"
        raise InvalidRequest("query", f"{position}: at most {_MAX_CHARACTERS} are allowed")


def score_of(logprobs: Sequence[float]) -> float:
    """Return the probability of yes, 0 to 1, given that the answer is yes or no."""
    yes, no = logprobs
    return 1 / (1 + math.exp(min(no - yes, 700.0)))


def _field_path(index: int, field: str) -> str:
    return f"documents[{index}]"
