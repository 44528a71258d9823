"""The tokenizer loses no byte and loads in transformers."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import AutoTokenizer

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
