import json

import pytest
import tokenizers
import transformers

from baton.service.settings import SettingsError
from gateway.text.control_tokens import Match
from gateway.text.detokenizer import Detokenizer
from gateway.text.origins import Rendered
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


HTML = ("<table>", "<td>", "</td>", "<h1>", "<b>", "</code>")


@pytest.mark.parametrize("text", ["a <td>b</td>", "<table><td>the <b>fox</code>", "<h1> the fox"])
def test_html_is_text_where_the_vocabulary_has_words_of_it(text):
    """As Gemma's has, which calls them not special; beside a control token too."""
    value = byte_level(unspecial=(*HTML, "<tool_call>", "<tables>"))
    tokenizer, added = Tokenizer(value), special(value)
    theirs = tokenizers.Tokenizer.from_buffer(value).encode(text, add_special_tokens=False).ids
    assert encode(tokenizer, text) == tokenizer.encode_chat(Rendered(text, ())) == theirs
    assert set(theirs) & {added[tag] for tag in HTML}
    spelled = tokenizer.encode_chat(Rendered(f"<|user|>{text}<tool_call><|end|><tables>", (Match(0, len("<|user|>")),)))
    assert spelled[: len(theirs) + 1] == [added["<|user|>"], *theirs]
    assert not set(spelled[1:]) & {added[tag] for tag in ("<tool_call>", "<|end|>", "<tables>")}


def test_html_that_the_file_calls_special_is_none():
    value = changed(byte_level(unspecial=HTML), lambda content: content["added_tokens"][-1].update(special=True))
    assert "</code>" in Tokenizer(value).control_ids and "<b>" not in Tokenizer(value).control_ids


@pytest.mark.parametrize("value", [b"", b"{}", b'{"model": 1}', b"\xff"])
def test_a_file_that_is_no_tokenizer_is_named(value):
    with pytest.raises(SettingsError, match="tokenizer.json: not a tokenizer"):
        Tokenizer(value)


@pytest.mark.parametrize("kind", ["byte_level", "with begin", "sentencepiece"])
@pytest.mark.parametrize(("begin", "end"), [("<s>", None), ("<s>", "</s>"), (None, "</s>"), (None, None)])
def test_tokens_around_a_text_that_tokenizer_config_asks_for(kind, begin, end):
    """DeepSeek's tokenizer.json puts none there. One that it does put there stays, and is put there once."""
    files = {"byte_level": byte_level(), "with begin": byte_level("<s>"), "sentencepiece": sentencepiece("normalizer")}
    ids, tokenizer = special(files[kind]), Tokenizer(files[kind], begin=begin, end=end)
    inner = tokenizer.encode_chat(Rendered("the fox", ()))
    is_begun = begin is not None or kind != "byte_level"
    wanted = [*[ids["<s>"]] * is_begun, *inner, *[ids["</s>"]] * (end is not None)]
    assert tokenizer.encode_text("the fox") == wanted
    if kind == "byte_level" and (begin or end):
        theirs = transformers.PreTrainedTokenizerFast(
            tokenizer_object=tokenizers.Tokenizer.from_buffer(files[kind]), bos_token="<s>", eos_token="</s>",
            add_bos_token=begin is not None, add_eos_token=end is not None,
        )  # fmt: skip
        assert theirs("the fox").input_ids == wanted
    assert tokenizer.encode_text("the </s> fox")[-1] == (ids["</s>"] if end else inner[-1])


def test_a_token_around_a_text_that_the_vocabulary_has_not():
    assert Tokenizer(byte_level(), begin="<none>").encode_text("the fox") == TOKENIZERS["byte_level"].encode_text(
        "the fox"
    )


def changed(value: bytes, change) -> bytes:
    content = json.loads(value)
    change(content)
    return json.dumps(content).encode()


def test_a_token_of_an_id_beyond_all_vocabularies():
    """The library would write gigabytes where it writes the vocabulary down, for the first constraint."""
    value = changed(byte_level(), lambda content: content["model"]["vocab"].update({"far": 2**31}))
    with pytest.raises(SettingsError, match=r"^a.json: a token has id 2147483648, at most 1048575 is believed$"):
        Tokenizer(value, "a.json")


@pytest.mark.parametrize("type_", [None, {"a": 1}])
def test_a_step_whose_type_is_no_text(type_):
    """The library takes it for one of those that fit its other values."""
    step = {"clean_text": True, "handle_chinese_chars": True, "strip_accents": None, "lowercase": False}
    step |= {} if type_ is None else {"type": type_}
    tokenizer = Tokenizer(changed(byte_level(), lambda content: content.update(normalizer=step)))
    assert tokenizer.encode_text("the fox") and tokenizer.can_fit(10**9, 1)


@pytest.mark.parametrize("kind", ["byte_level", "normalizer", "first", "always", "never"])
def test_what_is_around_a_control_token_of_a_client_stays_as_it_is(kind):
    """Vocabularies that put a space before the first word of a text alone ("first": Mistral) put none behind control
    tokens."""
    tokenizer = Tokenizer(byte_level() if kind == "byte_level" else sentencepiece(kind))
    end = special(tokenizer.json)["<|end|>"]

    def encode(text: str) -> list[int]:
        marks = ("<s>", "<|user|>", "<|end|>")
        return tokenizer.encode_chat(Rendered(text, tuple(Match(text.index(m), text.index(m) + len(m)) for m in marks)))

    plain, spelled = encode("<s><|user|>the fox<|end|>the"), encode("<s><|user|>the fox</s><|end|>the")
    assert plain == tokenizer.decoder.encode("<s><|user|>the fox<|end|>the", add_special_tokens=False).ids
    assert spelled[: plain.index(end)] == plain[: plain.index(end)]
    assert spelled[spelled.index(end) :] == plain[plain.index(end) :]
