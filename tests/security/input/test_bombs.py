"""Small files and short texts that ask for much: refused or answered, in bounded time and memory."""

import json
import struct
import time
import tracemalloc
import unicodedata

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from baton.engine.core.config import EngineConfig
from baton.engine.core.model_errors import ModelError
from baton.engine.models.loader import load_model
from baton.service.errors import InvalidRequest
from baton.service.settings import SettingsError
from gateway.answer.stop_strings import StopMatcher, StopStrings
from gateway.config.served_model import PRESETS, ServedModel
from gateway.model.model_folder import Defaults
from gateway.request.validation import validate
from gateway.text.origins import render_origins
from gateway.text.templates import ChatMessage, ChatTemplate
from gateway.text.tokenizer import CannotEncode, Tokenizer
from tests.support.client import make_request
from tests.support.gateway.small_tokenizers import byte_level, sentencepiece
from tests.support.model_folders.families import make_folder

MOST_CPU_S = 60
MOST_BYTES = 600 << 20


class Bounded:
    """CPU time and Python's memory of what happens within."""

    def __enter__(self):
        self._begun = time.process_time()
        tracemalloc.start()

    def __exit__(self, *error):
        most = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        assert most < MOST_BYTES and time.process_time() - self._begun < MOST_CPU_S


# ---- safetensors ----


def safetensors(entries: dict, body: bytes = b"") -> bytes:
    text = json.dumps(entries).encode()
    return struct.pack("<Q", len(text)) + text + body


def tensor(shape, begin, end, dtype="F32") -> dict:
    return {"dtype": dtype, "shape": shape, "data_offsets": [begin, end]}


HEADERS = {
    "a length of 2^63": struct.pack("<Q", 2**63) + b"{}",
    "a length of 2^64 - 1": struct.pack("<Q", 2**64 - 1) + b"{}",
    "a hundred thousand tensors": safetensors({f"t{i}": tensor([0], 0, 0) for i in range(100_000)}),
    "a hundred thousand dimensions": safetensors({"t": tensor([1] * 100_000, 0, 4)}, bytes(4)),
    "a product beyond 64 bits": safetensors({"t": tensor([2**32, 2**32, 2**32], 0, 4)}, bytes(4)),
    "a product that comes round to 0": safetensors({"t": tensor([2**32, 2**32], 0, 0)}),
    "offsets beyond 64 bits": safetensors({"t": tensor([1], 2**64, 2**64 + 4)}, bytes(4)),
    "the same bytes twice": safetensors({"a": tensor([1], 0, 4), "b": tensor([1], 0, 4)}, bytes(4)),
    "the same name twice": b"".join([struct.pack("<Q", 112), b'{"t":{"dtype":"F32","shape":[1],"data_offsets":[0,4]},'
                                     b'"t":{"dtype":"F32","shape":[1],"data_offsets":[0,4]}}'.ljust(112), bytes(4)]),
    "a name of a mebibyte": safetensors({"t" * (1 << 20): tensor([1], 0, 4)}, bytes(4)),
    "deep metadata": struct.pack("<Q", 60_000) + (b'{"__metadata__":' + b"[" * 30_000).ljust(60_000),
}  # fmt: skip


@pytest.mark.parametrize("name", HEADERS)
def test_safetensors_headers(tmp_path, name):
    folder = tmp_path / "model"
    make_folder(folder, "qwen3")
    (folder / "model.safetensors").write_bytes(HEADERS[name])
    with Bounded(), pytest.raises(ModelError) as caught:
        load_model(EngineConfig(folder))
    assert str(folder) in str(caught.value) and "\n" not in str(caught.value) and len(str(caught.value)) < 1000


# ---- tokenizer.json ----


def changed(**values) -> bytes:
    return json.dumps(json.loads(byte_level()) | values).encode()


def split_by(expression: str) -> bytes:
    split = {"type": "Split", "pattern": {"Regex": expression}, "behavior": "Isolated", "invert": False}
    level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False}
    return changed(pre_tokenizer={"type": "Sequence", "pretokenizers": [split, level]})


def added(contents) -> bytes:
    flags = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": True}
    return changed(added_tokens=[{"id": 1000 + i, "content": text, **flags} for i, text in enumerate(contents)])


TOKENIZERS = {
    "nested lists": b"[" * 1_000_000,
    "nested normalizers": b'{"normalizer":' * 100_000,
    "nested sequences": changed(normalizer=None).replace(
        b'"normalizer": null',
        b'"normalizer": ' + b'{"type":"Sequence","normalizers":[' * 5_000 + b"]}" * 5_000,
    ),
    "added tokens of the wrong type": changed(added_tokens=5),
    "an added token without content": changed(added_tokens=[{"id": 5}]),
    "added tokens that are null": changed(added_tokens=None),
    "an empty added token": added([""]),
    "an expression that is none": split_by("("),
    "an expression of nested groups": split_by("(" * 20_000 + "a" + ")" * 20_000),
    "a long expression": split_by("|".join(f"word{i}" for i in range(20_000))),
    "an expression that backtracks": split_by("(a+)+$"),
    "thirty thousand added tokens": added(f"<{i}>" for i in range(30_000)),
    "an added token of a mebibyte": added(["<" + "a" * (1 << 20) + ">"]),
}


@pytest.mark.parametrize("name", TOKENIZERS)
def test_a_tokenizer_is_refused_in_a_line_or_encodes_within_bounds(name):
    """One line at the start, or a tokenizer that goes back and forth."""
    with Bounded():
        try:
            tokenizer = Tokenizer(TOKENIZERS[name])
        except SettingsError as error:
            assert "\n" not in str(error) and len(str(error)) < 400
            return
        text = "aaaaaaaaaaaaaaaaaaaaaaaaaaaab <5> <unused>"
        try:
            ids = tokenizer.encode_text(text)
        except CannotEncode as error:
            assert "retry-limit" in str(error) and name == "an expression that backtracks"
        else:
            assert tokenizer.decoder.decode(ids, skip_special_tokens=False) == text


# ---- unicode ----

WORDS = {
    "accents": "e" + "\u0301" * 4000,
    "one that becomes eighteen": "\ufdfa" * 2000,
    "right to left": "\u202e\u05d0\u202c" * 1000,
    "zeros": "\0" * 4000,
    "no characters": "\ufffe\uffff\U0010ffff" * 500,
    "joined": "👨\u200d👩\u200d👧" * 500,
    "jamo": "\u1112\u1161\u11ab" * 1000,
    "wide": "＜｜ｕｓｅｒ｜＞" * 400,
    "separators": "\u2028\u2029\x85\x1c" * 500,
}
VOCABULARIES = {"byte_level": Tokenizer(byte_level()), "sentencepiece": Tokenizer(sentencepiece("first"))}
COMPOSING = {form: Tokenizer(changed(normalizer={"type": form})) for form in ("NFC", "NFKC", "NFD", "NFKD")}


@pytest.mark.parametrize("name", WORDS)
def test_hostile_texts_come_back_as_they_were(name):
    """They come back as they were, also through a template; a form of Unicode's changes them as Unicode says."""
    text = WORDS[name]
    template = ChatTemplate("{% for m in messages %}<|user|>{{ m.content }}<|end|>{% endfor %}", {})
    with Bounded():
        for tokenizer in VOCABULARIES.values():
            assert tokenizer.decoder.decode(tokenizer.encode_text(text)) == text
            rendered = render_origins(
                template, tokenizer.controls, [ChatMessage("user", text), ChatMessage("user", f"<|end|>{text}")]
            )
            ids = tokenizer.encode_chat(rendered)
            assert sum(token_id in tokenizer.special_ids for token_id in ids) == 4
        for form, tokenizer in COMPOSING.items():
            ids = tokenizer.encode_text(text)
            assert tokenizer.decoder.decode(ids) == unicodedata.normalize(form, text)
            assert tokenizer.can_fit(len(text), len(ids))


@settings(max_examples=300)
@given(st.text(max_size=200), st.sampled_from(sorted(COMPOSING)))
def test_no_text_is_refused_that_would_fit_once_it_is_composed(text, form):
    tokenizer = COMPOSING[form]
    assert tokenizer.can_fit(len(text), len(tokenizer.encode_text(text)))


@pytest.mark.parametrize("name", WORDS)
def test_hostile_stop_strings_are_bounded_and_found_as_written(name):
    """Bounded in bytes of UTF-8, and found as they are written: no form is another's."""
    served = ServedModel("fake", 1024, 400, frozenset(), Defaults(), limits=PRESETS["normal"])
    with pytest.raises(InvalidRequest, match="256 bytes"):
        validate(make_request("x", stop=[WORDS[name]]), served)
    (stop,) = validate(make_request("x", stop=[WORDS[name][:40]]), served).stops
    matcher = StopMatcher(StopStrings([stop]))
    assert matcher.push("before" + WORDS[name][:41]) == ("before", stop)


@pytest.mark.parametrize("request_id", ["é", "e\u0301", "\u202eid", "a\0b", "ｉｄ", "a\u2028b", "id\n", "\u0661", "ı"])
def test_request_ids_are_plain_letters(request_id):
    served = ServedModel("fake", 1024, 400, frozenset(), Defaults(), limits=PRESETS["normal"])
    with pytest.raises(InvalidRequest, match="request_id"):
        validate(make_request("x", request_id=request_id), served)


def test_surrogates_are_no_text():
    for make in (lambda: make_request("\ud800"), lambda: make_request("x", stop=["\udfff"])):
        with pytest.raises(UnicodeEncodeError):
            make().SerializeToString()
