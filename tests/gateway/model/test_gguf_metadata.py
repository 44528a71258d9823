"""Metadata of a .gguf file that say something else than they must: one line that names the key, from gateway and engine
alike, and never an error of Python's."""

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from baton.engine.core.model_errors import ModelError
from baton.engine.models.registry import read_spec
from baton.service.settings import SettingsError
from gateway.model.model_file import read_model
from tests.support.gguf.metadata import (
    ARRAY,
    BOOL,
    F32,
    F64,
    I32,
    I64,
    STRING,
    U32,
    U64,
    Value,
    metadata,
    write,
)
from tests.support.gguf.vocabulary import CONTROL, NORMAL, USER_DEFINED

KINDS = ("gpt2", "llama")


@pytest.fixture
def path(tmp_path):
    return tmp_path / "a.gguf"


def of_gateway(path) -> str | None:
    try:
        read_model(path)
    except SettingsError as error:
        return str(error)


def of_engine(path) -> str | None:
    try:
        read_spec(path)
    except ModelError as error:
        return str(error)


@pytest.mark.parametrize("kind", KINDS)
def test_the_file_that_is_changed_below_is_good(path, kind):
    write(path, metadata(kind))
    assert (of_gateway(path), of_engine(path)) == (None, None)


@pytest.mark.parametrize("named", [(), ("eos",), ("eos", "eot"), ("eom",)])
def test_control_and_added_tokens_that_are_written_as_ends_are_ends(path, named):
    """As llama.cpp has it: files of Llama 3 name 128009 of three, those of Qwen one of two. Converters call a token
    added that is not special, as a fine-tune's <|im_end|>."""
    said = metadata()
    tokens = said["tokenizer.ggml.tokens"].value
    for name in ("eos", "eot", "eom"):
        said[f"tokenizer.ggml.{name}_token_id"] = Value(I32, tokens.index("<|user|>") if name in named else -1)
    for token, type_ in (("<|im_end|>", USER_DEFINED), ("<|end|>", NORMAL)):
        said["tokenizer.ggml.token_type"].value[tokens.index(token)] = type_
    write(path, said)
    written = {"</s>", "<|endoftext|>", "<|eot_id|>", "<|im_end|>", *["<|user|>"] * bool(named)}
    assert {tokens[id_] for id_ in read_model(path).eos_ids} == written
    assert set(read_spec(path).eos_token_ids) == read_model(path).eos_ids


def test_an_end_that_the_embedding_has_not_is_none(path):
    said = metadata()
    said["tokenizer.ggml.tokens"].value.append("<|eom_id|>")
    said["tokenizer.ggml.token_type"].value.append(CONTROL)
    write(path, said, num_tokens=420)
    assert 420 not in read_model(path).eos_ids | set(read_spec(path).eos_token_ids)


BROKEN = {
    "general.alignment": [Value(STRING, "32"), Value(ARRAY, [32], U32), Value(U32, 0), Value(I32, -32), Value(F32, 32.0)],
    "general.architecture": [Value(U32, 5), Value(ARRAY, ["llama"], STRING)],
    "llama.context_length": [Value(STRING, "777"), Value(U32, 0), Value(I64, -5), Value(ARRAY, [], U32)],
    "tokenizer.ggml.tokens": [Value(U32, 5), Value(ARRAY, [1, 2], I32), Value(ARRAY, [], STRING), Value(STRING, "abc"),
                              Value(ARRAY, ["a" * 5000] * 3, STRING)],
    "tokenizer.ggml.token_type": [Value(ARRAY, ["1"], STRING), Value(U32, 1), Value(ARRAY, [1], I32)],
    "tokenizer.ggml.merges": [Value(ARRAY, ["ab"], STRING), Value(ARRAY, ["x yzzy"], STRING), Value(U32, 1)],
    "tokenizer.ggml.model": [Value(U32, 1), Value(STRING, "")],
    "tokenizer.ggml.pre": [Value(BOOL, True), Value(STRING, "x")],
    "tokenizer.ggml.bos_token_id": [Value(STRING, "1"), Value(ARRAY, [1], U32), Value(F32, 1.0)],
    "tokenizer.ggml.eos_token_id": [Value(STRING, "1"), Value(U32, 10**6), Value(I64, -7)],
    "tokenizer.ggml.add_bos_token": [Value(STRING, "yes"), Value(U32, 1)],
    "tokenizer.chat_template": [Value(U32, 1), Value(ARRAY, ["x"], STRING)],
}  # fmt: skip


@pytest.mark.parametrize("key, value", [(key, value) for key, values in BROKEN.items() for value in values], ids=str)
def test_the_gateway_names_the_key(path, key, value):
    write(path, metadata() | {key: value})
    told = of_gateway(path)
    assert told.startswith(f"{path}: ") and "\n" not in told and len(told) < 400
    assert key in told or (value.value == ["x yzzy"] and "tokenizer.ggml makes no tokenizer" in told)


BROKEN_FOR_ENGINE = {
    "general.alignment": BROKEN["general.alignment"],
    "general.architecture": [*BROKEN["general.architecture"], Value(STRING, "\n")],
    "llama.context_length": BROKEN["llama.context_length"],
    "llama.attention.head_count": [Value(U32, 0), Value(STRING, "2"), Value(ARRAY, [2, 1], U32), Value(ARRAY, [0], U32),
                                   Value(I32, -2), Value(F32, 2.0)],
    "llama.attention.head_count_kv": [Value(U32, 0), Value(STRING, "2"), Value(U32, 7)],
    "llama.embedding_length": [Value(U32, 0), Value(STRING, "32"), Value(BOOL, True)],
    "llama.block_count": [Value(U32, 0), Value(U64, 2**63), Value(ARRAY, [1], U32)],
    "llama.attention.layer_norm_rms_epsilon": [Value(STRING, "x"), Value(F32, float("nan")), Value(F32, -1.0)],
    "llama.rope.freq_base": [Value(STRING, "x"), Value(F32, float("inf")), Value(F32, -1.0)],
    "llama.rope.dimension_count": [Value(STRING, "16"), Value(U32, 4)],
    "llama.rope.scaling.type": [Value(U32, 1), Value(STRING, "wide")],
    "tokenizer.ggml.eos_token_id": BROKEN["tokenizer.ggml.eos_token_id"],
}  # fmt: skip


@pytest.mark.parametrize(
    "key, value", [(key, value) for key, values in BROKEN_FOR_ENGINE.items() for value in values], ids=str
)
def test_the_engine_says_it_in_one_line(path, key, value):
    write(path, metadata() | {key: value})
    told = of_engine(path)
    assert told.startswith(f"{path}: ") and "\n" not in told and len(told) < 400


SCALARS = st.one_of(
    st.builds(Value, st.just(U32), st.sampled_from([0, 1, 5, 2**31, 2**32 - 1])),
    st.builds(Value, st.just(I32), st.sampled_from([-1, -(2**31), 7])),
    st.builds(Value, st.just(U64), st.sampled_from([0, 2**62, 2**64 - 1])),
    st.builds(Value, st.just(I64), st.sampled_from([-1, 2**62])),
    st.builds(Value, st.just(F32), st.sampled_from([0.0, -1.0, 1e38, float("inf"), float("nan")])),
    st.builds(Value, st.just(F64), st.sampled_from([0.5, 1e300])),
    st.builds(Value, st.just(BOOL), st.booleans()),
    st.builds(Value, st.just(STRING), st.text(st.characters(exclude_categories=["Cs"]), max_size=6)),
)
ANY_VALUE = st.one_of(
    SCALARS,
    st.builds(
        lambda inner, count: Value(ARRAY, [inner.value] * count, inner.type_id),
        SCALARS,
        st.sampled_from([0, 1, 3, 420]),
    ),
)


@settings(max_examples=200, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data(), kind=st.sampled_from(KINDS))
def test_types_swapped_at_random(path, data, kind):
    said = metadata(kind)
    keys = [*said, "llama.attention.key_length", "llama.rope.scaling.factor", "split.count", "llama.vocab_size",
            "tokenizer.ggml.unknown_token_id", "tokenizer.ggml.add_eos_token"]  # fmt: skip
    for key in data.draw(st.lists(st.sampled_from(keys), min_size=1, max_size=4, unique=True)):
        swap = data.draw(st.one_of(ANY_VALUE, st.none(), st.sampled_from(list(said.values()))))
        said.pop(key, None)
        if swap is not None:
            said[key] = swap
    write(path, said)
    for told in (of_gateway(path), of_engine(path)):
        assert told is None or (told.startswith(f"{path}: ") and "\n" not in told)
