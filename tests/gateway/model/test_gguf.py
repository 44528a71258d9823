"""The tokenizer and the limits of a .gguf file: the same token ids as the tokenizer.json that it was made of, and as
transformers' own reading of such files."""

import json
from types import SimpleNamespace

import gguf
import numpy as np
import pytest
from tokenizers import Tokenizer as Reference

from baton.gguf import GGUFHeader
from baton.service.settings import SettingsError
from baton.tokenizer import gguf_tokenizer
from baton.tokenizer.gguf_tokenizer import RULES, tokenizer_json
from gateway.model.model_file import read_model
from gateway.text.detokenizer import Detokenizer
from gateway.text.tokenizer import Tokenizer
from tests.support.gateway.small_tokenizers import CONTROLS, byte_level, sentencepiece
from tests.support.gguf.vocabulary import add_vocabulary

TEXTS = [
    "The quick brown fox jumps over the lazy dog.",
    " the  the   fox\n\n\tover 12345 dogs' tails, it's 3.14!",
    "Größe, façade, naïve, 東京, Здравствуйте, 🙂",
    "<|im_start|>user\nthe fox<|im_end|>\n",
    "",
]


def write(path, reference: bytes, kind: str, pre: str = "", **extra):
    """A file with the vocabulary of a tokenizer.json, and little else."""
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_context_length(777)
    vocabulary = add_vocabulary(writer, reference, kind, pre)
    writer.add_bos_token_id(vocabulary["<s>"])
    writer.add_eos_token_id(vocabulary["</s>"])
    writer.add_eot_token_id(vocabulary["<|eot_id|>"])
    writer.add_chat_template("{{ bos_token }}{% for m in messages %}{{ m['content'] }}{% endfor %}")
    for name, value in extra.items():
        writer.add_bool(f"tokenizer.ggml.{name}", value)
    writer.add_tensor("token_embd.weight", np.zeros((len(vocabulary), 32), np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def assert_same(path, reference: bytes, add_special: bool = True):
    found, expected = Reference.from_buffer(tokenizer_json(GGUFHeader(path))), Reference.from_buffer(reference)
    for text in TEXTS:
        ids = expected.encode(text, add_special_tokens=add_special).ids
        assert found.encode(text, add_special_tokens=add_special).ids == ids, text
        assert found.decode(ids) == expected.decode(ids)


def test_a_byte_level_vocabulary_is_that_of_its_tokenizer_json(tmp_path):
    assert_same(write(tmp_path / "a.gguf", byte_level(), "gpt2", "gpt-2"), byte_level())


def test_byte_level_with_bos(tmp_path):
    assert_same(write(tmp_path / "a.gguf", byte_level("<s>"), "gpt2", "gpt-2", add_bos_token=True), byte_level("<s>"))


def test_a_sentencepiece_vocabulary_is_that_of_its_tokenizer_json(tmp_path):
    reference = sentencepiece("normalizer")
    assert_same(write(tmp_path / "a.gguf", reference, "llama"), reference)


def test_many_control_tokens_are_added_at_once():
    """Each call reads those that are there: one by one the 6,242 of Gemma took seconds of each start."""
    added = []
    tokenizer = SimpleNamespace(add_special_tokens=added.append, add_tokens=added.append)
    gguf_tokenizer._add_tokens(tokenizer, list("abcdef"), [3, 4, 3, 4, 1, 2])
    assert [[token.content for token in each] for each in added] == [["a", "c", "f"], ["b", "d"]]


@pytest.mark.parametrize("pre", ["llama-bpe", "qwen2", "tekken"])
def test_rules_as_transformers_has_them(tmp_path, pre):
    from transformers.integrations.gguf.gguf_tokenizer_mapping import convert_gguf_tokenizer, get_gguf_tokenizer

    path = write(tmp_path / "a.gguf", byte_level(), "gpt2", pre, add_bos_token=False)
    architecture, values, _ = get_gguf_tokenizer(str(path))
    theirs, _ = convert_gguf_tokenizer(architecture, values)
    assert_same(path, theirs.to_str().encode(), add_special=False)


@pytest.mark.parametrize(
    ("pre", "begins", "whole_words"),
    [("llama-bpe", True, True), ("tekken", True, True), ("smaug-bpe", False, False), ("qwen2", False, False)],
)
def test_what_llama_cpp_does_where_the_file_is_silent(tmp_path, pre, begins, whole_words):
    """`add_bos` and `ignore_merges` of llama-vocab.cpp."""
    found = tokenizer_json(GGUFHeader(write(tmp_path / "a.gguf", byte_level(), "gpt2", pre)))
    begin = Reference.from_buffer(byte_level()).token_to_id("<s>")
    assert (Reference.from_buffer(found).encode("the").ids[0] == begin) == begins
    assert json.loads(found)["model"]["ignore_merges"] == whole_words


def test_a_model_as_the_gateway_reads_it(tmp_path):
    reference = Reference.from_buffer(byte_level())
    model = read_model(write(tmp_path / "Small-Q8.gguf", byte_level(), "gpt2", "gpt-2"))
    assert (model.name, model.context, model.vocab_size) == ("Small-Q8", 777, reference.get_vocab_size())
    ends = ("</s>", "<|endoftext|>", "<|eot_id|>", "<|im_end|>", "<|end|>")
    assert model.eos_ids == {reference.token_to_id(end) for end in ends}
    assert model.special_tokens == {"bos_token": "<s>", "eos_token": "</s>"}
    assert "messages" in model.chat_template and len(model.tokenizer_digest) == 32
    tokenizer = Tokenizer(model.tokenizer_json)
    assert tokenizer.special_ids == {reference.token_to_id(token) for token in CONTROLS}
    plain = tokenizer.encode_text("the <|im_end|> fox")
    assert not tokenizer.special_ids.intersection(plain)
    assert Detokenizer(tokenizer).decode(plain) == "the <|im_end|> fox"


def test_the_digest_is_of_the_tokenizer_alone(tmp_path):
    one, same = (write(tmp_path / name, byte_level(), "gpt2", "gpt-2") for name in ("a.gguf", "b.gguf"))
    other = write(tmp_path / "c.gguf", byte_level(), "gpt2", "llama-bpe")
    digests = [GGUFHeader(path).tokenizer_digest for path in (one, same, other)]
    assert digests[0] == digests[1] != digests[2]


@pytest.mark.parametrize(
    ("kind", "pre", "message"),
    [("bert", "", "'bert' is not supported, one of gpt2, llama"), ("gpt2", "viking", "'viking' is not supported")],
)
def test_unknown_kinds(tmp_path, kind, pre, message):
    reference = sentencepiece("normalizer") if kind == "bert" else byte_level()
    path = write(tmp_path / "a.gguf", reference, kind, pre)
    with pytest.raises(SettingsError, match=message) as error:
        read_model(path)
    assert str(path) in str(error.value) and "\n" not in str(error.value)
    assert kind == "bert" or all(name in str(error.value) for name in RULES)


@pytest.mark.parametrize("keep", [0, 3, 20, 300, 4000])
def test_a_truncated_file_is_named(tmp_path, keep):
    path = write(tmp_path / "a.gguf", byte_level(), "gpt2", "gpt-2")
    path.write_bytes(path.read_bytes()[:keep])
    with pytest.raises(SettingsError, match="a.gguf: truncated or not a GGUF file"):
        read_model(path)


def test_a_file_without_a_vocabulary_is_refused(tmp_path):
    writer = gguf.GGUFWriter(tmp_path / "a.gguf", "llama")
    writer.add_context_length(777)
    writer.add_tensor("token_embd.weight", np.zeros((4, 32), np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    with pytest.raises(SettingsError, match="tokenizer.ggml.tokens is missing"):
        read_model(tmp_path / "a.gguf")
