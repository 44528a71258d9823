"""Write answers of the embeddings and rerank APIs, in OpenAI's form and in Cohere's."""

import base64
import math
import struct
from collections.abc import Sequence
from typing import Any

from baton.v1 import inference_pb2 as pb
from gateway.http.wire.encoding import Json, to_bytes

_FLOAT_BYTES = 21  # of a number and its comma: 21.1 on average in random vectors of 768 numbers


def embedding(index: int, values: Sequence[float], encoding: str) -> bytes:
    """Return an object of the answer of /v1/embeddings, as JSON. base64 encodes fp32, little-endian."""
    vector: Any = list(values)
    if encoding == "base64":
        vector = base64.b64encode(struct.pack(f"<{len(vector)}f", *vector)).decode()
    return to_bytes({"object": "embedding", "index": index, "embedding": vector})


def embedding_bytes(num_numbers: int, encoding: str) -> int:
    """Return how many bytes such an object has; for numbers in text this is an estimate."""
    return 52 + (4 * math.ceil(4 * num_numbers / 3) if encoding == "base64" else _FLOAT_BYTES * num_numbers)


def embeddings(objects: Sequence[bytes], model: str, usage: pb.Usage) -> bytes:
    """Return the answer of /v1/embeddings with these objects."""
    counts = {"prompt_tokens": usage.prompt_tokens, "total_tokens": usage.prompt_tokens}
    tail = to_bytes({"model": model, "usage": counts})
    return b'{"object":"list","data":[' + b",".join(objects) + b"]," + tail[1:]


def rerank(response: pb.ScoreResponse, documents: Sequence[str], top_n: int, model: str) -> Json:
    """Return the answer of /v1/rerank, best first. `documents`: texts to return with the scores, or none."""
    order = sorted(range(len(response.scores)), key=lambda index: -response.scores[index])[:top_n]
    results: list[Json] = [{"index": index, "relevance_score": response.scores[index]} for index in order]
    if documents:
        results = [{**each, "document": {"text": documents[each["index"]]}} for each in results]
    usage = {"prompt_tokens": response.usage.prompt_tokens, "total_tokens": response.usage.prompt_tokens}
    return {"id": f"rerank-{response.request_id}", "model": model, "results": results, "usage": usage}


def cohere_rerank(response: pb.ScoreResponse, top_n: int) -> Json:
    """Return the answer of /v2/rerank, best first."""
    ranked = rerank(response, (), top_n, "")
    meta = {"api_version": {"version": "2"}, "tokens": {"input_tokens": response.usage.prompt_tokens}}
    return {"id": ranked["id"], "results": ranked["results"], "meta": meta}
