"""Tools that are not strict, and whose schemas no grammar keeps to: each is given up by itself."""

import math

import pytest

from baton.constraints.constraint import BadConstraint, Constraint, quoted
from baton.constraints.grammar import Vocabulary
from baton.service.errors import InvalidRequest
from gateway.answer import tool_schema_fallback
from gateway.answer.answer_planner import AnswerPlanner
from gateway.answer.tool_schema_fallback import ToolSchemaFallback
from gateway.parsers.formats import format_named
from gateway.text.detokenizer import Detokenizer
from gateway.text.templates import ChatMessage, ChatOptions, Conversation
from gateway.text.tokenizer import Tokenizer
from tests.support.gateway.small_tokenizers import byte_level

GOOD = {"properties": {"kept": {"enum": [1, 2]}}, "required": ["kept"]}
NEEDS_ITSELF = {"properties": {"a": {"$ref": "#"}}, "required": ["a"]}
IMPOSSIBLE = {"properties": {"a": {"type": "string", "minLength": 3, "maxLength": 2}}, "required": ["a"]}


class Text:
    """What checks constraints, here and now."""

    def __init__(self, source: bytes, vocab_size: int):
        self.vocabulary, self.checked = Vocabulary(source, vocab_size), list[Constraint]()

    async def check_constraint(self, constraint: Constraint, tenant: str, deadline: float, field: str) -> None:
        self.checked.append(constraint)
        try:
            self.vocabulary.compile(constraint)
        except BadConstraint as error:
            raise InvalidRequest(field, str(error)) from None


@pytest.fixture(params=["hermes", "qwen-xml", "deepseek-dsml", "pythonic"])
def fallback(request):
    answer_format = format_named(request.param)
    tokenizer = Tokenizer(source := byte_level(unspecial=answer_format.markers))
    text = Text(source, tokenizer.decoder.get_vocab_size())
    return ToolSchemaFallback(AnswerPlanner(tokenizer, Detokenizer(tokenizer), answer_format), text, "", math.inf)


async def grammar(fallback: ToolSchemaFallback, *schemas: dict, **options) -> str:
    tools = tuple({"name": f"t{n}", "parameters": schema} for n, schema in enumerate(schemas))
    asked = ChatOptions(tools, callable_tools=tuple(tool["name"] for tool in tools), must_call=True, **options)
    plan = await fallback.plan_for(Conversation((ChatMessage("user", "a"),), asked), [0], None)
    return plan.constraint.text


@pytest.mark.parametrize(("num_bad", "is_kept"), [(0, True), (1, True), (4, True), (5, False)])
async def test_one_whose_schema_cannot_be_kept_to_is_given_up_alone(fallback, num_bad, is_kept):
    """With it all were that are not strict."""
    text = await grammar(fallback, *([IMPOSSIBLE, NEEDS_ITSELF] * 3)[:num_bad], GOOD)
    assert ("kept" in text) == is_kept and "minLength" not in text and "$ref" not in text
    assert all(f"t{n}" in text for n in range(num_bad + 1))


async def test_a_search_that_takes_long_gives_up_all(fallback, monkeypatch):
    """Each of 128 tools may take a second to be checked."""
    clock = iter(range(0, 1000, 4))
    monkeypatch.setattr(tool_schema_fallback, "now", lambda: next(clock))
    text = await grammar(fallback, GOOD, GOOD, IMPOSSIBLE, GOOD, GOOD)
    assert "kept" not in text and all(f"t{n}" in text for n in range(5))
    assert len(fallback._text.checked) <= 6


async def test_one_alone_is_given_up_without_a_search(fallback):
    assert "minLength" not in await grammar(fallback, IMPOSSIBLE)
    assert len(fallback._text.checked) == 2


async def test_those_that_are_too_large_together_are_all_given_up(fallback):
    large = {"properties": {"x" * 50_000: {}}}
    assert "xxx" not in await grammar(fallback, large, large, large)
    assert len(fallback._text.checked) == 1, "none is looked at alone"


async def test_a_strict_one_is_refused_whatever_the_others_are(fallback):
    with pytest.raises(InvalidRequest, match=r"messages.tools\[1\].parameters: Unsatisfiable schema"):
        await grammar(fallback, IMPOSSIBLE, IMPOSSIBLE, GOOD, strict_tools=("t1",))


@pytest.mark.parametrize(
    ("schema", "told"),
    [
        ({"type": "array", "uniqueItems": True}, "/properties/a/properties/b/uniqueItems: is not supported"),
        (
            {"type": "array", "items": {"pattern": "(?=a)b"}},
            "/properties/a/properties/b/items/pattern: look-around is not supported",
        ),
    ],
)
async def test_an_error_of_a_strict_one_says_which_and_where(fallback, schema, told):
    """In places of the grammar that nobody has seen it did: at 1(31)."""
    bad = {"properties": {"a": {"type": "object", "properties": {"b": schema}}}}
    for others in ({}, {"strict_tools": ("t0", "t1", "t2")}):
        with pytest.raises(InvalidRequest) as caught:
            await grammar(fallback, GOOD, GOOD, bad, **{"strict_tools": ("t2",), **others})
        assert str(caught.value).startswith(f"messages.tools[2].parameters: {told}")


async def test_strict_ones_that_are_too_much_together_are_told_of_together(fallback):
    large = {"properties": {"x" * 40_000: {}}}
    with pytest.raises(InvalidRequest, match="messages.tools:|messages.tools have"):
        await grammar(fallback, large, large, large, large, strict_tools=("t0", "t1", "t2", "t3"))


@pytest.mark.parametrize("fallback", ["pythonic"], indirect=True)
async def test_tools_that_the_form_cannot_call_are_not_looked_at(fallback):
    schemas = {"kept": GOOD, "bad": IMPOSSIBLE} | {f"no-name-{n}": IMPOSSIBLE for n in range(5)}
    tools = tuple({"name": name, "parameters": schema} for name, schema in schemas.items())
    asked = ChatOptions(tools, callable_tools=tuple(schemas), must_call=True)
    plan = await fallback.plan_for(Conversation((ChatMessage("user", "a"),), asked), [0], None)
    text = plan.constraint.text
    assert '"kept=' in text and quoted("bad(") in text and "no-name" not in text
