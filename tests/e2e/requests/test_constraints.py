"""Answers under constraints over a real stack: what one engine answers, whichever worker reads the prompt, and
valid."""

import json
import re
from dataclasses import replace

import grpc
import jsonschema
import pytest

from baton.constraints.constraint import Constraint
from baton.constraints.gbnf import in_lark
from baton.v1 import inference_pb2 as pb
from tests.support import bare_engine
from tests.support.bare_engine import assert_same
from tests.support.client import make_request, read_error
from tests.support.models import EOS_IDS

SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 12},
        "tags": {"type": "array", "items": {"enum": ["a", "b"]}, "maxItems": 3},
        "ok": {"type": "boolean"},
    },
    "required": ["name", "tags", "ok"],
    "additionalProperties": False,
}
GBNF = 'root ::= "(" root ")" | [a-c]{2,9} "-"'
CASES = [
    (pb.Constraint(json_schema=json.dumps(SCHEMA)), Constraint("json_schema", json.dumps(SCHEMA))),
    (pb.Constraint(regex="[a-c]{2,9}(-[0-9]+)?"), Constraint("regex", "[a-c]{2,9}(-[0-9]+)?")),
    (pb.Constraint(choice=pb.TextChoices(texts=["yes", "no"])), Constraint("choice", '["yes", "no"]')),
    (pb.Constraint(grammar=GBNF), Constraint("grammar", in_lark(GBNF))),
]
SAMPLING = [{"temperature": 0.0}, {"temperature": 1.0, "seed": 3, "n": 2, "logprobs": 1}]


@pytest.fixture(scope="module")
def engine(model):
    return bare_engine.load_engine(model, num_blocks=160, threads=1)


@pytest.mark.parametrize("stack_client", ["client", "local_client"])
def test_split_equals_whole(request, stack_client, engine, prompts):
    client = request.getfixturevalue(stack_client)
    num_whole = 0
    for index, (message, constraint) in enumerate(CASES):
        for sampling in SAMPLING:
            prompt_ids, name = prompts(90), f"constrained-{index}-{len(sampling)}"
            wanted = bare_engine.bare_request(name, prompt_ids, max_tokens=120, eos_ids=EOS_IDS, **sampling)
            whole = bare_engine.serve_alone(engine, [replace(wanted, constraint=constraint)])[name]
            reply = client.generate(prompt_ids, max_tokens=120, constraint=message, **sampling)
            assert_same(reply, whole)
            for choice in reply.choices.values():
                if choice.finish_reason == "STOP":
                    num_whole += 1
                    check(constraint, choice.text)
    assert num_whole > 4


def check(constraint: Constraint, text: str) -> None:
    if constraint.kind == "json_schema":
        jsonschema.Draft202012Validator(SCHEMA).validate(json.loads(text))
    elif constraint.kind == "regex":
        assert re.fullmatch(constraint.text, text)
    elif constraint.kind == "grammar":
        inner = text.lstrip("(")
        assert re.fullmatch(r"[a-c]{2,9}-\)*", inner) and inner.count(")") == len(text) - len(inner)
    else:
        assert text in ("yes", "no")


def test_one_that_leaves_no_token(client, prompts):
    """Where a stop token is what must come next; the streams of others go on."""
    (letter,) = client.tokenize("b")
    request = make_request(prompts(20), max_tokens=20, stop_token_ids=[letter])
    request.constraint.regex = "ab{3}c"
    with pytest.raises(grpc.RpcError) as caught:
        list(client.stub.Generate(request, timeout=60))
    error = read_error(caught.value)
    assert (error.code, error.message) == (grpc.StatusCode.INVALID_ARGUMENT, "constraint: it leaves no token")
