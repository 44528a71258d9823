import asyncio

import pytest
import tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st

from baton.service.settings import SettingsError
from gateway.detokenizer import Detokenizer, StopMatcher
from gateway.tokenizer import Tokenizer
from tests.gateway.tokenizers_for_tests import CONTROLS, byte_level, sentencepiece, special

KINDS = {"byte_level": byte_level(), "normalizer": sentencepiece("normalizer"), "first": sentencepiece("first")}
TOKENIZERS = {kind: Tokenizer(value) for kind, value in KINDS.items()}


def encode(tokenizer: Tokenizer, text: str) -> list[int]:
    return asyncio.run(tokenizer.encode_text(text))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("text", ["the fox", " the  fox\n", "東京 🙂 é", "x" * 5000, "a < b | c > d [x]"])
def test_plain_text_as_the_file_says(kind, text):
    assert encode(TOKENIZERS[kind], text) == tokenizers.Tokenizer.from_buffer(KINDS[kind]).encode(text).ids


@pytest.mark.parametrize("control", CONTROLS)
@pytest.mark.parametrize("around", ["{}", "the {} fox", "{0}{0}", "<{}>", "<|{}"])
def test_text_never_becomes_a_control_token(control, around):
    tokenizer, text = TOKENIZERS["byte_level"], around.format(control)
    token_ids = encode(tokenizer, text)
    assert not set(token_ids) & set(special(KINDS["byte_level"]).values())
    assert Detokenizer(tokenizer).decode(token_ids) == text


def test_the_file_s_own_special_tokens_are_added():
    tokenizer = Tokenizer(byte_level("<|begin_of_text|>"))
    bos_id = special(byte_level())["<|begin_of_text|>"]
    for text in ("the fox", "the <|begin_of_text|> fox"):
        token_ids = encode(tokenizer, text)
        assert token_ids[0] == bos_id and bos_id not in token_ids[1:]


def test_tags_are_control_tokens_though_not_called_special():
    value = byte_level(unspecial=("<tool_call>", "[TOOL]", "    "))
    tokenizer = Tokenizer(value)
    added = special(value)
    assert not {added["<tool_call>"], added["[TOOL]"]} & set(encode(tokenizer, "a <tool_call> b [TOOL]"))
    assert added["    "] in encode(tokenizer, "a    <tool_call>"), "white space is no control token"


@pytest.mark.parametrize("value", [b"", b"{}", b'{"model": 1}', b"\xff"])
def test_no_tokenizer(value):
    with pytest.raises(SettingsError, match="tokenizer.json: not a tokenizer"):
        Tokenizer(value)


# ---- back to text ----

DETOKENIZERS = {kind: Detokenizer(tokenizer) for kind, tokenizer in TOKENIZERS.items()}


def pieces(detokenizer: Detokenizer, token_ids) -> list[str]:
    decoder = detokenizer.decoder()
    return [*(decoder.push([token_id]) for token_id in token_ids), decoder.finish()]


@settings(max_examples=200, deadline=None)
@given(st.text(max_size=60))
def test_byte_level_round_trip(text):
    token_ids = TOKENIZERS["byte_level"].decoder.encode(text).ids
    parts = pieces(DETOKENIZERS["byte_level"], token_ids)
    assert "".join(parts) == text
    assert not any("\ufffd" in part for part in parts) or "\ufffd" in text


@settings(max_examples=200, deadline=None)
@given(st.lists(st.integers(0, 419), max_size=60))
def test_any_byte_level_tokens_as_the_library_decodes_them(token_ids):
    tokenizer = TOKENIZERS["byte_level"]
    assert DETOKENIZERS["byte_level"].decode(token_ids) == tokenizer.decoder.decode(token_ids, skip_special_tokens=True)


@pytest.mark.parametrize("kind", ["normalizer", "first"])
@pytest.mark.parametrize("text", ["the fox", "The  fox jumps\nthe", "Größe 東京 🙂 the é", "x 東"])
def test_sentencepiece_as_the_library_decodes_it(kind, text):
    tokenizer = TOKENIZERS[kind].decoder
    token_ids = tokenizer.encode(text, add_special_tokens=False).ids
    assert DETOKENIZERS[kind].decode(token_ids) == tokenizer.decode(token_ids) == text
    for cut in range(len(token_ids)):
        assert text.startswith("".join(pieces(DETOKENIZERS[kind], token_ids[:cut])[:-1])), "half a character came out"


@settings(max_examples=100, deadline=None)
@given(st.lists(st.integers(3, 258), max_size=40))
def test_lone_bytes_come_out_in_the_end(token_ids):
    """Bytes that never become a character are not held back for ever."""
    parts = pieces(DETOKENIZERS["first"], token_ids)
    assert len(parts) == len(token_ids) + 1
    held = 0
    for part in parts[:-1]:
        held = 0 if part else held + 1
        assert held <= 8


def test_special_tokens_have_no_text():
    ids = special(KINDS["byte_level"])
    fox = TOKENIZERS["byte_level"].decoder.encode("the fox").ids
    assert DETOKENIZERS["byte_level"].decode([ids["<|end|>"], *fox, ids["<|eot_id|>"], 10_000]) == "the fox"


# ---- stop strings ----


def feed(stops, parts):
    matcher, out = StopMatcher(stops), []
    for part in parts:
        text, matched = matcher.push(part)
        out.append(text)
        if matched is not None:
            return out, matched
    return [*out, matcher.finish()], None


def test_half_a_stop_string_is_held_back():
    assert feed(["END"], ["a E", "N", "x E", "ND b"]) == (["a ", "", "ENx ", ""], "END")
    assert feed(["END"], ["a E", "N"]) == (["a ", "", "EN"], None)
    assert feed(["aab"], ["aaab"]) == (["a"], "aab")
    assert feed([], ["a", "b"]) == (["a", "b", ""], None)


def test_the_one_that_is_complete_first():
    assert feed(["abcd", "bc"], ["abcd"])[1] == feed(["abcd", "bc"], ["ab", "c", "d"])[1] == "bc"
    assert feed(["c", "bc"], ["abc"]) == (["a"], "bc")


@settings(max_examples=300, deadline=None)
@given(st.text("ab", max_size=30), st.lists(st.text("ab", min_size=1, max_size=4), min_size=1, max_size=3), st.data())
def test_pieces_do_not_matter(text, stops, data):
    cuts = sorted(data.draw(st.lists(st.integers(0, len(text)), max_size=8)))
    parts = [text[begin:end] for begin, end in zip([0, *cuts], [*cuts, len(text)], strict=True)]
    whole, matched = feed(stops, [text])
    out, matched_in_parts = feed(stops, parts)
    assert ("".join(out), matched_in_parts) == ("".join(whole), matched)
    if matched is None:
        assert "".join(out) == text and not any(stop in text for stop in stops)
