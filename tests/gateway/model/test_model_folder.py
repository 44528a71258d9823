"""The small files of a model are checked at the start: one line names the file and the value."""

import json

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from baton.engine.models.registry import read_spec
from baton.sampling_params import SAMPLING_DEFAULTS
from baton.service.settings import SettingsError
from gateway.model.model_folder import Defaults, read_folder

NESTED = "[" * 100_000 + "]" * 100_000


@pytest.fixture
def copied(folder, tmp_path):
    for path in folder.iterdir():
        (tmp_path / path.name).write_bytes(path.read_bytes())
    return tmp_path


def change(folder, name: str, **values) -> None:
    path = folder / name
    path.write_text(json.dumps(json.loads(path.read_text()) | values))


def refusal(folder, name: str) -> str:
    with pytest.raises(SettingsError) as caught:
        read_folder(folder)
    told = str(caught.value)
    assert told.startswith(str(folder / name)) and "\n" not in told and len(told) < 400
    return told


def test_a_text_model_within_another(copied):
    expected, path = read_folder(copied), copied / "config.json"
    path.write_text(json.dumps({"text_config": json.loads(path.read_text())}))
    found = read_folder(copied)
    assert (found.context, found.vocab_size, found.eos_ids) == (expected.context, expected.vocab_size, expected.eos_ids)


def test_the_ends_of_the_outer_model_count(copied):
    """Without generation_config.json answers ran past an end that only the outer config names."""
    (copied / "generation_config.json").unlink()
    text = json.loads((copied / "config.json").read_text()) | {"eos_token_id": 1, "model_type": "mistral"}
    outer = {"architectures": ["Mistral3ForConditionalGeneration"], "eos_token_id": [1, 6], "text_config": text}
    (copied / "config.json").write_text(json.dumps(outer))
    assert read_folder(copied).eos_ids == {1, 6}
    sizes = dict(hidden_size=48, intermediate_size=64, num_hidden_layers=1, num_attention_heads=8)
    outer["text_config"] = text | sizes
    (copied / "config.json").write_text(json.dumps(outer))
    assert set(read_spec(copied).eos_token_ids) == {1, 6}
    (copied / "config.json").write_text(json.dumps(outer | {"eos_token_id": None}))
    assert read_folder(copied).eos_ids == {1} and read_spec(copied).eos_token_ids == (1,)


GEMMA3_4B = {
    "architectures": ["Gemma3ForConditionalGeneration"],
    "eos_token_id": [1, 106],
    "model_type": "gemma3",
    "text_config": {
        "hidden_size": 2560,
        "intermediate_size": 10240,
        "model_type": "gemma3_text",
        "num_hidden_layers": 34,
        "rope_scaling": {"factor": 8.0, "rope_type": "linear"},
        "sliding_window": 1024,
    },
    "torch_dtype": "bfloat16",
}


def test_what_gemma_3_leaves_out(copied):
    """As published: what workers read of it is what the gateway reads."""
    (copied / "config.json").write_text(json.dumps(GEMMA3_4B))
    spec, found = read_spec(copied), read_folder(copied)
    assert (found.context, found.vocab_size) == (spec.context, spec.vocab_size) == (131_072, 262_208)


@pytest.mark.parametrize("kind", ["other", ["gemma3_text"], None])
def test_what_another_text_model_leaves_out_is_missing(copied, kind):
    (copied / "config.json").write_text(json.dumps({"text_config": {"model_type": kind}}))
    assert "vocab_size is missing" in refusal(copied, "config.json")


@pytest.mark.parametrize(
    "values, expected",
    [
        ({"top_k": -1}, Defaults()),  # vLLM's "off"
        ({"top_k": 0}, Defaults()),  # transformers'
        ({"temperature": -3.0, "do_sample": False}, Defaults()),  # is not looked at
        ({"temperature": 0, "do_sample": True}, Defaults()),
        ({"temperature": 1e-06, "do_sample": True}, Defaults()),  # as Qwen2.5-VL has it
        ({"top_p": 1, "min_p": 0, "repetition_penalty": 1, "temperature": None, "top_k": None}, Defaults()),
        ({"max_new_tokens": 2**31 - 1}, Defaults(max_tokens=2**31 - 1)),
    ],
)
def test_what_others_take_for_nothing(copied, values, expected):
    change(copied, "generation_config.json", **values)
    assert read_folder(copied).defaults == expected


@pytest.mark.parametrize(
    "values",
    [
        {"top_p": 0}, {"top_p": 1.5}, {"top_p": "0.9"}, {"top_p": float("nan")}, {"top_p": True}, {"top_k": -2},
        {"top_k": 2**32}, {"top_k": 5.5}, {"top_k": "5"}, {"min_p": -0.1}, {"repetition_penalty": 0},
        {"repetition_penalty": 10**400}, {"temperature": -1, "do_sample": True},
        {"temperature": float("inf"), "do_sample": True}, {"do_sample": "yes"}, {"max_new_tokens": 0},
        {"max_new_tokens": -1}, {"max_new_tokens": [5]}, {"eos_token_id": 400}, {"eos_token_id": -1},
        {"eos_token_id": [0, 10**6]}, {"eos_token_id": "0"}, {"eos_token_id": True}, {"eos_token_id": {"a": 1}},
    ],
    ids=str,
)  # fmt: skip
def test_what_means_nothing_is_refused(copied, values):
    """Each would have been refused, or have ended in INTERNAL, for requests that say nothing of it; an end beyond the
    vocabulary ended workers."""
    change(copied, "generation_config.json", **values)
    assert next(iter(values)) in refusal(copied, "generation_config.json")


@pytest.mark.parametrize(
    "values",
    [
        {"vocab_size": 0}, {"vocab_size": "400"}, {"vocab_size": 400.0}, {"vocab_size": 2**63},
        {"max_position_embeddings": True}, {"max_position_embeddings": -5}, {"max_position_embeddings": None},
    ],
    ids=str,
)  # fmt: skip
def test_a_wrong_value_of_config_json_is_named(copied, values):
    change(copied, "config.json", **values)
    assert next(iter(values)) in refusal(copied, "config.json")


def test_the_config_s_own_end_counts_where_there_is_no_other(copied):
    change(copied, "config.json", eos_token_id=400)
    read_folder(copied)
    (copied / "generation_config.json").unlink()
    assert "eos_token_id 400" in refusal(copied, "config.json")


@pytest.mark.parametrize(
    "values",
    [
        {"chat_template": 5}, {"chat_template": ["a"]}, {"chat_template": [{"name": "default"}]},
        {"chat_template": [{"name": "default", "template": 5}]}, {"chat_template": {"default": "x"}},
        {"bos_token": 5}, {"eos_token": ["</s>"]}, {"pad_token": {"text": "x"}},
    ],
    ids=str,
)  # fmt: skip
def test_a_wrong_value_of_tokenizer_config_json_is_named(copied, values):
    change(copied, "tokenizer_config.json", **values)
    assert next(iter(values)) in refusal(copied, "tokenizer_config.json")


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        ({}, (None, None)),
        ({"add_bos_token": True, "bos_token": "<s>"}, ("<s>", None)),
        ({"add_bos_token": True, "add_eos_token": True, "eos_token": {"content": "</s>"}}, (None, "</s>")),
        ({"add_bos_token": False, "bos_token": "<s>", "add_eos_token": None}, (None, None)),
    ],
)
def test_tokens_around_a_text(copied, values, expected):
    (copied / "tokenizer_config.json").write_text(json.dumps(values))
    found = read_folder(copied)
    assert (found.begin, found.end) == expected


OLD = {"bos_token": None, "eos_token": "</s>"}
MAP = {"bos_token": "<s>", "eos_token": {"content": "<|end|>"}}


@pytest.mark.parametrize(
    ("of_tokenizer", "special_map", "expected"),
    [
        (OLD, MAP, {"bos_token": "<s>", "eos_token": "<|end|>"}),
        (OLD | {"added_tokens_decoder": {}}, MAP, {"eos_token": "</s>"}),
        ({"extra_special_tokens": {"eot_token": "<|eot|>"}}, {}, {"eot_token": "<|eot|>"}),
        ({"extra_special_tokens": ["<|eot|>"], "eot_token": "<|eot|>"}, {}, {"eot_token": "<|eot|>"}),
        ({"add_bos_token": False, "sound_token": None, "image_token": {"content": "<i>"}}, {}, {"image_token": "<i>"}),
    ],
    ids=["the map of an old folder", "not that of a new one", "extra ones", "of their own", "no texts"],
)
def test_tokens_that_a_template_may_name(copied, of_tokenizer, special_map, expected):
    (copied / "tokenizer_config.json").write_text(json.dumps(of_tokenizer))
    (copied / "special_tokens_map.json").write_text(json.dumps(special_map))
    assert read_folder(copied).special_tokens == expected


NAMED = [{"name": "default", "template": "a"}, {"name": "tool_use", "template": "b"}, {"name": "rag", "template": "c"}]


@pytest.mark.parametrize(
    ("files", "values", "expected"),
    [
        ({}, {}, (None, None)),
        ({}, {"chat_template": "a"}, ("a", None)),
        ({}, {"chat_template": NAMED}, ("a", "b")),
        ({}, {"chat_template": NAMED[1:]}, (None, "b")),
        ({"chat_template.jinja": "x"}, {"chat_template": NAMED}, ("x", None)),
        ({"chat_template.jinja": "x", "additional_chat_templates/tool_use.jinja": "y"}, {}, ("x", "y")),
        ({"chat_template.json": '{"chat_template": "z"}'}, {}, ("z", None)),  # as Mistral Small 3.1 and Llama 4 have it
        ({"chat_template.json": "{}"}, {}, (None, None)),
        ({"chat_template.json": "no JSON"}, {"chat_template": "a"}, ("a", None)),
        ({"chat_template.json": "no JSON", "chat_template.jinja": "x"}, {}, ("x", None)),
    ],
)
def test_templates_by_name(copied, files, values, expected):
    """As transformers chooses: tool_use where there are tools. It keeps them in a list, in new folders in files."""
    (copied / "chat_template.jinja").unlink(missing_ok=True)
    (copied / "tokenizer_config.json").write_text(json.dumps(values))
    for name, text in files.items():
        (copied / name).parent.mkdir(exist_ok=True)
        (copied / name).write_text(text)
    found = read_folder(copied)
    assert (found.chat_template, found.tool_template) == expected


@pytest.mark.parametrize("content", ["no JSON", '{"chat_template": 5}', '{"chat_template": ["a"]}'])
def test_a_template_of_a_processor_that_is_none(copied, content):
    (copied / "tokenizer_config.json").unlink()
    (copied / "chat_template.json").write_text(content)
    refusal(copied, "chat_template.json")


def test_a_template_that_is_no_text(copied):
    (copied / "chat_template.jinja").write_bytes(b"\xff\xfe")
    refusal(copied, "chat_template.jinja")


@pytest.mark.parametrize("name", ["config.json", "generation_config.json", "tokenizer_config.json"])
@pytest.mark.parametrize("content", ["", "{", "[]", "null", NESTED, '{"a": ' + "9" * 5000 + "}"], ids=range(6))
def test_no_json_object(copied, name, content):
    (copied / name).write_text(content)
    refusal(copied, name)


JSON = st.recursive(
    st.one_of(st.none(), st.booleans(), st.integers(), st.floats(), st.text(max_size=5)),
    lambda inner: st.one_of(st.lists(inner, max_size=3), st.dictionaries(st.text(max_size=5), inner, max_size=3)),
    max_leaves=4,
)
FILES = {
    "config.json": ("vocab_size", "max_position_embeddings", "eos_token_id"),
    "generation_config.json": (
        "eos_token_id", "do_sample", "temperature", "top_k", "top_p", "min_p", "repetition_penalty", "max_new_tokens"
    ),
    "tokenizer_config.json": ("chat_template", "bos_token", "eos_token", "unk_token"),
    "special_tokens_map.json": ("bos_token", "pad_token"),
}  # fmt: skip


@settings(max_examples=250, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_whatever_stands_there_is_good_or_refused_in_one_line(copied, data):
    for name, keys in FILES.items():
        path = copied / name
        before = path.read_text() if path.exists() else "{}"
        values = data.draw(st.dictionaries(st.sampled_from(keys), JSON, max_size=2))
        path.write_text(json.dumps(json.loads(before) | values))
    try:
        read = read_folder(copied)
    except SettingsError as error:
        assert "\n" not in str(error)
    else:
        assert all(0 <= token_id < read.vocab_size for token_id in read.eos_ids)
        sampling = read.defaults.sampling
        assert sampling["top_k"] >= 0 and 0 < sampling["top_p"] <= 1 and sampling["repetition_penalty"] > 0
    finally:
        for name in FILES:
            (copied / name).unlink(missing_ok=True)
        pristine = {"max_position_embeddings": 1024, "vocab_size": 400, "eos_token_id": 0}
        (copied / "config.json").write_text(json.dumps(pristine))


def test_defaults_are_the_folder_s(folder):
    read = read_folder(folder)
    assert (read.name, read.context, read.vocab_size, read.eos_ids) == ("fake", 1024, 400, {0, 4})
    assert read.defaults == Defaults() and read.defaults.sampling["temperature"] == 0


@pytest.mark.parametrize(
    "generation, expected",
    [
        ({}, Defaults()),
        ({"do_sample": True}, Defaults(SAMPLING_DEFAULTS | {"temperature": 1.0})),
        (
            {"do_sample": True, "temperature": 0.6, "top_k": 20},
            Defaults(SAMPLING_DEFAULTS | {"temperature": 0.6, "top_k": 20}),
        ),
        ({"temperature": 0.6, "top_p": 0.8}, Defaults(SAMPLING_DEFAULTS | {"top_p": 0.8})),
        (
            {"max_new_tokens": 7, "repetition_penalty": 1.1},
            Defaults(SAMPLING_DEFAULTS | {"repetition_penalty": 1.1}, max_tokens=7),
        ),
    ],
)
def test_defaults_are_those_of_generation_config_json(copied, generation, expected):
    (copied / "generation_config.json").write_text(json.dumps(generation))
    assert read_folder(copied).defaults == expected


@pytest.mark.parametrize(
    ("eos_token", "ends"), [("<|end|>", {0, 3, 4}), ({"content": "<|end|>"}, {0, 3, 4}), ("</s>", {0, 3})]
)
async def test_an_answer_ends_with_the_tokenizers_own_end_too(folder, copied, cluster, eos_token, ends):
    """ChatML finetunes of Llama and Mistral name it in tokenizer_config.json alone."""
    (copied / "generation_config.json").write_text(json.dumps({"eos_token_id": [0, 3]}))
    of_tokenizer = json.loads((folder / "tokenizer_config.json").read_text()) | {"eos_token": eos_token}
    (copied / "tokenizer_config.json").write_text(json.dumps(of_tokenizer))
    async with cluster(model=copied) as c:
        assert c.fleet.model.eos_ids == ends


@pytest.mark.parametrize(
    "name, content",
    [*(("config.json", content) for content in (None, "{", "{}", "[]")), ("tokenizer.json", None)],
)
def test_a_broken_folder_is_named(copied, name, content):
    (copied / name).unlink()
    if content is not None:
        (copied / name).write_text(content)
    with pytest.raises(SettingsError, match=name) as caught:
        read_folder(copied)
    assert "\n" not in str(caught.value)


def test_a_chat_template_file_goes_first(copied):
    (copied / "chat_template.jinja").write_text("{{ 1 }}")
    assert read_folder(copied).chat_template == "{{ 1 }}"
    (copied / "chat_template.jinja").unlink()
    named = {"chat_template": [{"name": "tool_use", "template": "t"}, {"name": "default", "template": "d"}]}
    (copied / "tokenizer_config.json").write_text(json.dumps(named))
    assert read_folder(copied).chat_template == "d"
