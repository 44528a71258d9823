"""Parse a body, and hold what it asks for as messages of baton.v1."""

import json
import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from baton.service.errors import InvalidRequest
from baton.v1 import inference_pb2 as pb
from gateway.http.fields.constraints import read_constraint
from gateway.http.fields.reading import fill_rows, without_nulls
from gateway.http.fields.tables import Field


@dataclass
class ParsedBody:
    """What a body asks for. `names`: the client's names for fields of baton.v1, by path."""

    id: str
    requests: list[pb.GenerateRequest]
    names: dict[str, str]
    stream: bool = False
    include_usage: bool = False
    continuous_usage_stats: bool = False
    return_token_ids: bool = False
    is_prompt_alone: bool = False  # the answer itself is left out (max_tokens was 0)
    hides_reasoning: bool = False  # reasoning is left out
    num_choices: int = field(init=False)  # of each request

    def __post_init__(self) -> None:
        self.num_choices = max(1, self.requests[0].sampling.n)


def parse(body: bytes) -> dict[str, Any]:
    """Return the JSON object in a body. Raises InvalidRequest."""
    try:
        values = json.loads(body, parse_constant=_no_constant)
    except (ValueError, RecursionError) as error:
        raise InvalidRequest("body", f"is not JSON: {str(error)[:200]}") from None
    if not isinstance(values, dict):
        raise InvalidRequest("body", "must be a JSON object")
    return without_nulls(values)


def new_id() -> str:
    """Return an id for a request that has none."""
    return secrets.token_hex(12)


def fill(request: pb.GenerateRequest, values: Mapping[str, Any], table: Sequence[Field], names: dict[str, str]) -> None:
    """Set the fields of `table` that are given, and the constraint; add the client's names to `names`. Raises
    InvalidRequest."""
    fill_rows(request, values, table, names)
    read_constraint(request, values, names)


def _no_constant(name: str) -> None:
    raise ValueError(f"{name} is no number of JSON")
