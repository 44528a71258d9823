"""Read bodies of requests for embeddings and ranks into messages of baton.v1."""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from baton.protocol import MAX_INPUTS
from baton.service.errors import InvalidRequest
from baton.v1 import inference_pb2 as pb
from gateway.http.fields.body import new_id
from gateway.http.fields.kinds import BOOLEAN, INTEGER, STRING, TEXTS
from gateway.http.fields.reading import check_known, check_notes, fill_rows, put, read_value
from gateway.http.fields.tables import COHERE_RERANK, EMBEDDING, RERANK, Field
from gateway.http.openai.requests import check_copies, id_of_prompt, read_prompts

ENCODINGS = ("float", "base64")  # of embeddings
MAX_TEXTS = 2048  # of one call for embeddings, as in OpenAI's API


@dataclass
class ParsedRerank:
    """What a body of /v1/rerank or /v2/rerank asks for."""

    request: pb.ScoreRequest
    names: dict[str, str]
    top_n: int  # how many documents the answer has, the best ones
    return_documents: bool = False


@dataclass
class ParsedEmbeddings:
    """What a body of /v1/embeddings asks for. `names`: the client's names for fields of each request."""

    requests: list[pb.EmbedRequest]  # each with as many texts as one may have, the last with the rest
    names: list[dict[str, str]]
    encoding: str  # one of ENCODINGS


def read_embeddings(values: Mapping[str, Any], most_inputs: int = MAX_INPUTS) -> ParsedEmbeddings:
    """Read the body of /v1/embeddings. `most_inputs`: the most texts of one request. Raises InvalidRequest."""
    check_known(values, EMBEDDING, {}, ("input", "encoding_format", "user"))
    check_notes(values)
    shared, names = pb.EmbedRequest(), {"inputs": "input"}
    fill_rows(shared, values, EMBEDDING, names)
    encoding = read_value(values, "encoding_format", STRING, "float")
    if encoding not in ENCODINGS:
        raise InvalidRequest("encoding_format", f"must be one of {', '.join(ENCODINGS)}")
    texts, body = read_prompts(values, "input", MAX_TEXTS), ParsedEmbeddings([], [], encoding)
    request_id = shared.request_id or new_id()
    check_copies("input", shared, -(-len(texts) // most_inputs))
    for begin in range(0, len(texts), most_inputs):
        request, part = pb.EmbedRequest(), texts[begin : begin + most_inputs]
        request.CopyFrom(shared)
        if len(texts) > most_inputs:
            request.request_id = id_of_prompt(request_id, begin // most_inputs)
        for text in part:
            put(request.inputs.add(), "text" if isinstance(text, str) else "token_ids.ids", text)
        body.requests.append(request)
        body.names.append(names | {f"inputs[{n}]": f"input[{begin + n}]" for n in range(len(part))})
    return body


def read_rerank(values: Mapping[str, Any]) -> ParsedRerank:
    """Read the body of /v1/rerank. Raises InvalidRequest."""
    body = _rerank(values, RERANK, ("return_documents", "user"))
    body.return_documents = read_value(values, "return_documents", BOOLEAN, True)
    return body


def read_cohere_rerank(values: Mapping[str, Any]) -> ParsedRerank:
    """Read the body of /v2/rerank. Its answer never has documents, though LiteLLM may ask for them. Raises
    InvalidRequest."""
    read_value(values, "return_documents", BOOLEAN, False)
    return _rerank(values, COHERE_RERANK, ("return_documents",))


def _rerank(values: Mapping[str, Any], table: Sequence[Field], others: Collection[str]) -> ParsedRerank:
    check_known(values, table, {}, ("documents", "top_n", *others))
    check_notes(values)
    request, names = pb.ScoreRequest(), dict[str, str]()
    fill_rows(request, values, table, names)
    request.documents.extend(read_value(values, "documents", TEXTS))
    top_n = read_value(values, "top_n", INTEGER, len(request.documents))
    if top_n < 0 or ("top_n" in values and top_n == 0):
        raise InvalidRequest("top_n", "must be at least 1")
    return ParsedRerank(request, names, top_n)
