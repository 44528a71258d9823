"""Token ids back to text: in whatever pieces they come, the text of the whole, and no token looked at twice."""

import json
import re

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from baton.service.settings import SettingsError
from gateway.text.detokenizer import Detokenizer
from gateway.text.tokenizer import Tokenizer
from tests.support.gateway.naive_text import sentencepiece_text
from tests.support.gateway.small_tokenizers import byte_level, sentencepiece, special

KINDS = {
    "byte_level": byte_level(),
    "normalizer": sentencepiece("normalizer"),
    "first": sentencepiece("first"),
    "gemma": sentencepiece("normalizer", strips_space=False, added=("<unused0>", "\n\n", "")),
}
BYTE_LEVEL = json.loads(KINDS["byte_level"])["decoder"]
SENTENCEPIECE = [kind for kind in KINDS if kind != "byte_level"]
TOKENIZERS = {kind: Tokenizer(value) for kind, value in KINDS.items()}
DETOKENIZERS = {kind: Detokenizer(tokenizer) for kind, tokenizer in TOKENIZERS.items()}
ANY_IDS = st.lists(st.one_of(st.integers(0, 430), st.integers(3, 258), st.sampled_from([1, 2, 198, 172])), max_size=40)


def pieces(detokenizer: Detokenizer, token_ids) -> list[str]:
    decoder = detokenizer.decoder()
    return [*(decoder.push([token_id]) for token_id in token_ids), decoder.finish()]


@settings(max_examples=200)
@given(st.text(max_size=60))
def test_byte_level_round_trip(text):
    token_ids = TOKENIZERS["byte_level"].decoder.encode(text).ids
    parts = pieces(DETOKENIZERS["byte_level"], token_ids)
    assert "".join(parts) == text
    assert not any("\ufffd" in part for part in parts) or "\ufffd" in text


@settings(max_examples=200)
@given(st.lists(st.integers(0, 419), max_size=60))
def test_any_byte_level_tokens_as_the_library_decodes_them(token_ids):
    tokenizer = TOKENIZERS["byte_level"]
    assert DETOKENIZERS["byte_level"].decode(token_ids) == tokenizer.decoder.decode(token_ids, skip_special_tokens=True)


@pytest.mark.parametrize("kind", SENTENCEPIECE)
@pytest.mark.parametrize("text", ["the fox", "The  fox jumps\nthe", "Größe 東京 🙂 the é", "x 東"])
def test_sentencepiece_as_the_library_decodes_it(kind, text):
    tokenizer = TOKENIZERS[kind].decoder
    token_ids = tokenizer.encode(text, add_special_tokens=False).ids
    whole = tokenizer.decode(token_ids)
    assert DETOKENIZERS[kind].decode(token_ids) == whole
    assert whole == text or (kind == "gemma" and whole == f" {text}")
    for cut in range(len(token_ids)):
        assert whole.startswith("".join(pieces(DETOKENIZERS[kind], token_ids[:cut])[:-1])), "half a character came out"


@pytest.mark.parametrize("kind", SENTENCEPIECE)
@settings(max_examples=500)
@given(token_ids=ANY_IDS)
def test_any_sentencepiece_tokens(kind, token_ids):
    """As bytes that are joined; and as the library decodes them, where all of them are characters."""
    tokenizer = TOKENIZERS[kind]
    known = [i for i in token_ids if i not in tokenizer.special_ids and tokenizer.decoder.id_to_token(i) is not None]
    text = DETOKENIZERS[kind].decode(token_ids)
    assert text == sentencepiece_text(map(tokenizer.decoder.id_to_token, known), strips_space=kind != "gemma")
    if "\ufffd" not in text:
        assert text == tokenizer.decoder.decode(token_ids, skip_special_tokens=True)


@pytest.mark.parametrize("kind", KINDS)
@settings(max_examples=300)
@given(token_ids=ANY_IDS, data=st.data())
def test_pieces_do_not_matter(kind, token_ids, data):
    cuts = sorted(data.draw(st.lists(st.integers(0, len(token_ids)), max_size=8)))
    decoder = DETOKENIZERS[kind].decoder()
    parts = [decoder.push(token_ids[a:b]) for a, b in zip([0, *cuts], [*cuts, len(token_ids)], strict=True)]
    assert "".join(parts) + decoder.finish() == DETOKENIZERS[kind].decode(token_ids)
    assert "".join(pieces(DETOKENIZERS[kind], token_ids)) == DETOKENIZERS[kind].decode(token_ids)


def test_an_unfinished_character_is_one_replacement():
    vocabulary = TOKENIZERS["first"].decoder.get_vocab()
    ids = lambda *values: [vocabulary[f"<0x{value:02X}>"] for value in values]  # noqa: E731
    for token_ids, text in (
        (ids(0xC3, 0xA9, 0xC3), "é\ufffd"),
        (ids(0xF0, 0x9F, 0x99), "\ufffd"),
        (ids(0xE6, 0x9D, 0x78), "\ufffdx"),
        (ids(0xF0, 0x9F, 0x99, 0x82, 0xF0, 0x9F), "🙂\ufffd"),
        (ids(0xA9, 0xA9), "\ufffd\ufffd"),
    ):
        assert "".join(pieces(DETOKENIZERS["first"], token_ids)) == DETOKENIZERS["first"].decode(token_ids) == text


@settings(max_examples=100)
@given(st.lists(st.integers(3, 258), max_size=40))
def test_bytes_are_held_back_no_longer_than_a_character(token_ids):
    held = 0
    for part in pieces(DETOKENIZERS["first"], token_ids)[:-1]:
        held = 0 if part else held + 1
        assert held < 4


def test_special_tokens_have_no_text():
    ids = special(KINDS["byte_level"])
    fox = TOKENIZERS["byte_level"].decoder.encode("the fox").ids
    assert DETOKENIZERS["byte_level"].decode([ids["<|end|>"], *fox, ids["<|eot_id|>"], 10_000]) == "the fox"


@pytest.mark.parametrize("steps", [["ByteLevel"], ["ByteLevel", "Fuse"], ["Fuse", "ByteLevel"]])
def test_a_byte_level_decoder_may_be_one_of_a_sequence(steps):
    """Each of its tokens was decoded alone: a character of two was two replacements."""
    content = json.loads(KINDS["byte_level"])
    content["decoder"] = {
        "type": "Sequence",
        "decoders": [BYTE_LEVEL if each == "ByteLevel" else {"type": each} for each in steps],
    }
    tokenizer = Tokenizer(json.dumps(content).encode())
    text = "the fox 🙂é"
    token_ids = tokenizer.encode_plain(text)
    assert "".join(pieces(Detokenizer(tokenizer), token_ids)) == text == tokenizer.decoder.decode(token_ids)


def test_a_byte_level_decoder_beside_others_is_refused():
    content = json.loads(KINDS["byte_level"])
    step = {"type": "Replace", "pattern": {"String": "x"}, "content": "y"}
    content["decoder"] = {"type": "Sequence", "decoders": [step, BYTE_LEVEL]}
    with pytest.raises(
        SettingsError, match="^a.json: its decoder has Replace beside ByteLevel, at most Fuse is known there$"
    ):
        Tokenizer(json.dumps(content).encode(), "a.json")


def test_a_decoder_that_writes_the_last_word_otherwise_is_refused():
    """As GPT-1's and CLIP's: what a token says depends on whether another one follows."""
    content = json.loads(KINDS["first"])
    content["decoder"] = {"type": "BPEDecoder", "suffix": "</w>"}
    with pytest.raises(SettingsError, match="^a.json: its decoder is BPEDecoder, which is not served$"):
        Tokenizer(json.dumps(content).encode(), "a.json")


def test_what_a_token_says_by_itself():
    def text_of(kind: str, token: str) -> tuple[bytes, bytes, str]:
        found = DETOKENIZERS[kind].token_text(TOKENIZERS[kind].decoder.token_to_id(token))
        return found.text, found.first_text, found.name

    assert text_of("normalizer", "▁the") == (b" the", b"the", "")
    assert text_of("normalizer", "<0xF0>") == (b"\xf0", b"\xf0", "")
    assert text_of("byte_level", "Ġthe") == (b" the", b" the", "")
    assert text_of("byte_level", "<|end|>") == (b"", b"", "<|end|>")


class Counting:
    """The library's tokenizer; `num_decoded` ids were asked for."""

    def __init__(self, tokenizer):
        self._tokenizer, self.num_decoded = tokenizer, 0

    def decode(self, token_ids, skip_special_tokens=True):
        self.num_decoded += len(token_ids)
        return self._tokenizer.decode(token_ids, skip_special_tokens=skip_special_tokens)

    def __getattr__(self, name):
        return getattr(self._tokenizer, name)


@pytest.mark.parametrize("kind", SENTENCEPIECE)
@pytest.mark.parametrize("step", [1, 7, 100_000])
def test_no_tokens_cost_more_than_their_number(kind, step):
    """Special ones, empty ones, spaces, bytes that never become a character: a vocabulary's worth of looks, and no more
    for 20,000 of them (once: 20 s, a window that grew with every special token)."""
    tokenizer = Tokenizer(KINDS[kind])
    tokenizer._normal = counting = Counting(tokenizer._normal)
    detokenizer = Detokenizer(tokenizer)
    counting.num_decoded = 0
    vocabulary = tokenizer.decoder.get_vocab()
    names = ["</s>", "", "▁", "<0x80>", "<0xC3>", "<0xF0>", "<0x20>", "\n\n", "<|end|>"]
    ids = [vocabulary[name] for name in names if name in vocabulary]
    assert len(ids) > 5
    for token_ids in [*([token_id] * 20_000 for token_id in ids), ids * 2_000]:
        decoder = detokenizer.decoder()
        for begin in range(0, len(token_ids), step):
            decoder.push(token_ids[begin : begin + step])
        assert not re.search("[a-z]", decoder.finish())
    assert counting.num_decoded <= 4 * len(ids)
