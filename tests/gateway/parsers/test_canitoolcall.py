"""Recorded outputs of models, with the calls and the reasoning in them: the fixtures of canitoolcall, whole and cut in
every way that it knows, one character at a time among them."""

import pytest
from canitoolcall.checks import run_checks
from canitoolcall.chunking import ChunkStrategy, split_text
from canitoolcall.fixtures import load_family, load_fixtures
from canitoolcall.results import Observation, ParsedToolCall, ParseResult, Status

from gateway.parsers.formats import format_named
from gateway.parsers.harmony import MARKERS
from tests.gateway.parsers.joined_calls import joined

PARSERS = {"qwen3-hermes": "hermes", "qwen3-xml": "qwen-xml", "mistral": "mistral", "gpt-oss": "harmony"}
MODELS = {"DeepSeek-V3-": "deepseek-v3", "DeepSeek-V3.1": "deepseek-v31", "DeepSeek": "deepseek-dsml", "Llama-3": "llama-json", "Llama-4": "pythonic"}  # fmt: skip
HARMONY_IDS = {200002: 6, 200003: 2, 200005: 1, 200006: 0, 200007: 4, 200008: 3, 200012: 5}
SPELLINGS = {chr(0x10F000 + index): marker for index, marker in enumerate(MARKERS)}
CHUNKINGS = [ChunkStrategy("char", seed) for seed in range(6)]
NO_TOOLS = {"none": {}}  # a call of one is a call all the same where it has a marker
FIXTURES = [each for each in load_fixtures() if each.family in (*PARSERS, "deepseek", "llama")]


def format_for(fixture):
    model = fixture.models[0].partition("/")[2]
    return format_named(
        PARSERS.get(fixture.family) or next(MODELS[begin] for begin in MODELS if model.startswith(begin))
    )


def text_of(fixture) -> str:
    """The output as parsers get it: in harmony's, control tokens are characters of their own."""
    if fixture.family != "gpt-oss":
        return fixture.raw_output
    text, at = fixture.raw_output, 0
    for token_id in fixture.output_token_ids:
        if token_id in HARMONY_IDS:
            marker = MARKERS[HARMONY_IDS[token_id]]
            begin = text.index(marker, at)
            text = f"{text[:begin]}{chr(0x10F000 + HARMONY_IDS[token_id])}{text[begin + len(marker) :]}"
            at = begin + 1
    return text


def parse(fixture, pieces) -> ParseResult:
    tools = {tool["function"]["name"]: tool["function"].get("parameters") or {} for tool in fixture.tools}
    spellings = SPELLINGS if fixture.family == "gpt-oss" else {}
    parser = format_for(fixture).parser(spellings, tools or NO_TOOLS, fixture.generation_prompt or "")
    found = [*map(parser.push, pieces), parser.finish(is_whole=False)]
    calls = joined(part for each in found for part in each.calls)
    content, reasoning = ("".join(getattr(each, name) for each in found) for name in ("content", "reasoning"))
    return ParseResult(
        content or None,
        reasoning or None,
        tuple(ParsedToolCall(call.name, call.arguments) for call in calls if call.is_last),
    )


@pytest.mark.parametrize("fixture", FIXTURES, ids=lambda fixture: fixture.id)
def test_recorded_output(fixture):
    text = text_of(fixture)
    whole = parse(fixture, [text])
    streams = {chunking.id: parse(fixture, split_text(text, chunking)) for chunking in CHUNKINGS}
    assert all(stream == whole for stream in streams.values())
    checks = run_checks(fixture, load_family(fixture.family), Observation(nonstream=whole, streams={}))
    bad = [f"{check.check}: {check.detail}" for check in checks if check.status not in (Status.PASS, Status.SOFT_PASS)]
    assert not bad, (bad, whole)
