"""The tokenizer loses no byte and loads in transformers."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import AutoTokenizer

from baton.quantization import calibration
from baton.training.data.tokenizer import SPECIAL_TOKENS, load_tokenizer, save_tokenizer, train_tokenizer

TEXT = "def f(self, x):\n    return self.join(x)\n\n\nclass A:\n    pass\n" * 20


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("tokenizer")
    save_tokenizer(train_tokenizer([TEXT], 300), folder, max_length=128)
    return folder


@pytest.fixture(scope="module")
def tokenizer(folder):
    return load_tokenizer(folder)


@given(text=st.text())
@settings(max_examples=100)
def test_decoding_gives_the_text_back(tokenizer, text):
    if not any(token in text for token in SPECIAL_TOKENS):
        assert tokenizer.decode(tokenizer.encode(text).ids) == text


def test_special_tokens_come_first(tokenizer):
    assert [tokenizer.token_to_id(token) for token in SPECIAL_TOKENS] == [0, 1, 2, 3, 4]
    assert tokenizer.encode("<|user|>").ids == [1]


def test_indentation_is_one_token(tokenizer):
    assert tokenizer.encode("\n    ").ids == tokenizer.encode("\n    ").ids[:1]


def test_transformers_agrees(folder, tokenizer):
    loaded = AutoTokenizer.from_pretrained(folder)
    assert loaded.encode(TEXT) == tokenizer.encode(TEXT).ids
    assert loaded.eos_token_id == 0
    messages = [{"role": "user", "content": "hi"}]
    prompt = loaded.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    assert prompt == "<|user|>hi<|end|><|assistant|>"


@pytest.mark.parametrize("load", [load_tokenizer, calibration.load_tokenizer])
def test_a_text_is_whole_whatever_bounds_the_tokenizer_was_saved_with(load, folder, tokenizer, tmp_path):
    """As programs that train leave them in tokenizer.json: `baton eval` had divided the bits of a text's first tokens
    by the bytes of all of it."""
    bounded = load_tokenizer(folder)
    bounded.enable_truncation(16)
    bounded.enable_padding(length=1024)
    save_tokenizer(bounded, tmp_path, max_length=128)
    texts = [TEXT, TEXT[:40]]
    assert [each.ids for each in load(tmp_path).encode_batch(texts)] == [tokenizer.encode(text).ids for text in texts]


def test_a_file_that_is_no_tokenizer_is_told_in_one_line(tmp_path):
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(ValueError, match=r"tokenizer\.json: not a tokenizer"):
        load_tokenizer(tmp_path)
