"""What stands between two texts: asked for in the form of the model's maker, where neither text spells a control
token."""

import pytest
import tokenizers

from gateway.text.infilling import find_infilling
from gateway.text.tokenizer import Tokenizer
from tests.support.gateway.small_tokenizers import byte_level, sentencepiece, special

QWEN = ("<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>")
STARCODER = ("<fim_prefix>", "<fim_suffix>", "<fim_middle>")
DEEPSEEK = ("<｜fim▁begin｜>", "<｜fim▁hole｜>", "<｜fim▁end｜>")
CODELLAMA = ("▁<PRE>", "▁<SUF>", "▁<MID>", "▁<EOT>")
CODESTRAL = ("[PREFIX]", "[MIDDLE]", "[SUFFIX]")


def with_tokens(tokenizer_json: bytes, tokens: tuple[str, ...]) -> bytes:
    tokenizer = tokenizers.Tokenizer.from_buffer(tokenizer_json)
    tokenizer.add_special_tokens(list(tokens))
    return tokenizer.to_str().encode()


@pytest.mark.parametrize("tokens", [QWEN, STARCODER, DEEPSEEK])
def test_forms_with_the_text_before_first(tokens):
    tokenizer = Tokenizer(byte_level("<|begin_of_text|>", unspecial=tokens))
    ids, form = special(tokenizer.json), find_infilling(tokenizer)
    prefix, suffix, middle = (ids[token] for token in tokens)
    expected = [ids["<|begin_of_text|>"], prefix, *tokenizer.encode_plain("def f("), suffix]
    assert form.encode("def f(", "):\n  x") == [*expected, *tokenizer.encode_plain("):\n  x"), middle]
    assert form.encode("", "x") == [ids["<|begin_of_text|>"], prefix, suffix, *tokenizer.encode_plain("x"), middle]


@pytest.mark.parametrize("kind", ["normalizer", "first"])
def test_the_text_behind_gets_no_space_that_it_has_not(kind):
    """Makers of models by SentencePiece put one before the first text alone."""
    llama = Tokenizer(with_tokens(sentencepiece(kind), CODELLAMA))
    ids, form = special(llama.json), find_infilling(llama)
    space_the, the = (llama.encode_plain(text) for text in ("the", "xthe"))
    the = the[2:]
    assert len(space_the) == 1 and len(the) == 2, "with the space in front it is one token"
    before, behind, middle, end = (ids[token] for token in CODELLAMA)
    assert form.encode("the", "the") == [ids["<s>"], before, *space_the, behind, *the, middle]
    assert form.end_ids == {end}
    codestral = Tokenizer(with_tokens(sentencepiece(kind), CODESTRAL))
    before, _, behind = (special(codestral.json)[token] for token in CODESTRAL)
    assert find_infilling(codestral).encode("the", "the") == [ids["<s>"], behind, *the, before, *space_the]


@pytest.mark.parametrize("text", ["<|fim_middle|>", "a<|endoftext|>"])
def test_neither_text_spells_a_control_token(text):
    tokenizer = Tokenizer(byte_level(unspecial=QWEN))
    ids, controls = find_infilling(tokenizer).encode(text, text), special(tokenizer.json)
    assert [token_id for token_id in ids if token_id in controls.values()] == [controls[token] for token in QWEN]


def test_what_a_file_does_not_tell_as_control_tokens_is_no_form():
    """A client's text could spell them: they are no tags, and added as words."""
    tokenizer = tokenizers.Tokenizer.from_buffer(sentencepiece("first"))
    tokenizer.add_tokens(list(CODELLAMA))
    assert find_infilling(Tokenizer(tokenizer.to_str().encode())) is None


def test_what_stands_behind_a_text_does_not_begin_a_prompt():
    source = byte_level("<|begin_of_text|>", unspecial=(*QWEN, "<|eos|>"))
    tokenizer = Tokenizer(source, "tokenizer.json", "<|begin_of_text|>", "<|eos|>")
    ids = special(source)
    assert tokenizer.encode_text("a")[-1] == ids["<|eos|>"]
    assert find_infilling(tokenizer).encode("a", "b")[:2] == [ids["<|begin_of_text|>"], ids[QWEN[0]]]


def test_a_part_of_a_form_is_none():
    assert find_infilling(Tokenizer(byte_level(unspecial=QWEN[:2]))) is None
