import pytest
import tokenizers

from baton.service.settings import SettingsError
from gateway.text.detokenizer import Detokenizer
from gateway.text.tokenizer import Tokenizer
from tests.support.gateway.small_tokenizers import CONTROLS, byte_level, sentencepiece, special

KINDS = {"byte_level": byte_level(), "normalizer": sentencepiece("normalizer"), "first": sentencepiece("first")}
TOKENIZERS = {kind: Tokenizer(value) for kind, value in KINDS.items()}


def encode(tokenizer: Tokenizer, text: str) -> list[int]:
    return tokenizer.encode_text(text)


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
