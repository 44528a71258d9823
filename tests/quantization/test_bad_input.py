"""Wrong use and wrong input: one line that names the thing."""

import json

import pytest
import torch
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer

from baton.engine.core.model_errors import ModelError
from baton.quantization.calibration import DEFAULT, NUM_SAMPLES, SAMPLE_TOKENS, Prompt, make_samples, read_prompts
from baton.quantization.core.errors import QuantizeError
from baton.quantization.quantize import plan, quantize
from tests.support.gateway.small_tokenizers import byte_level
from tests.support.model_folders.families import make_folder
from tests.support.model_folders.models_hard_to_quantize import make_demo_like


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return make_demo_like(tmp_path_factory.mktemp("float"))


@pytest.mark.parametrize(
    ("lines", "message"),
    [
        ("", "empty"),
        ("\n \n", "empty"),
        ('{"text": "a"}\nhello\n', "line 2: not JSON"),
        ('{"text": "a"}\n\n[1]\n', "line 3: not a JSON object"),
        ('{"body": "a"}\n', "line 1: needs one of"),
        ('{"text": ""}\n', "line 1: needs one of"),
        ('{"text": 5}\n', "line 1: needs one of"),
        ('{"text": "a", "messages": []}\n', "line 1: needs one of"),
        ('{"messages": [{"role": "user"}]}\n', "line 1: needs one of"),
        ('{"messages": []}\n', "line 1: needs one of"),
    ],
)
def test_calibration_files(tmp_path, lines, message):
    path = tmp_path / "c.jsonl"
    path.write_text(lines)
    with pytest.raises(QuantizeError, match=message) as raised:
        read_prompts(path)
    assert str(path) in str(raised.value) and "\n" not in str(raised.value)


@pytest.mark.parametrize("character", "\u2028\u2029\x85")
def test_separators_of_lines_within_a_text_end_no_line(tmp_path, character):
    """JSON has them as they are."""
    text = f"one{character}two"
    path = tmp_path / "calibration.jsonl"
    path.write_text(json.dumps({"text": text}, ensure_ascii=False) + "\r\n" + '{"text": "three"}\n', encoding="utf-8")
    assert [prompt.text for prompt in read_prompts(path)] == [text, "three"]


def test_calibration_files_that_cannot_be_read(tmp_path):
    (tmp_path / "latin").write_bytes(b'{"text": "\xe4"}')
    for name in ("latin", "missing"):
        with pytest.raises(QuantizeError, match="not readable"):
            read_prompts(tmp_path / name)


def test_the_three_kinds_of_line(tmp_path, model):
    path = tmp_path / "c.jsonl"
    messages = [{"role": "user", "content": "The quick brown fox jumps over the lazy dog."}]
    records = [{"text": "import os\n" * 400}, {"prompt": "The quick brown fox jumps."}, {"messages": messages}]
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    seen = []
    tokenizer = Tokenizer.from_file(str(model / "tokenizer.json"))
    samples = make_samples(read_prompts(path), tokenizer, lambda messages: seen.append(messages) or "rendered " * 20)
    assert seen == [messages] and len(samples) == 3 and len(samples[0]) == SAMPLE_TOKENS
    with pytest.raises(QuantizeError, match="shorter than"):
        make_samples(read_prompts(path)[1:2], _Letters(), lambda messages: "")


def test_a_conversation_begins_as_its_template_has_it():
    """Which writes what tokenizer.json puts before a text."""
    tokenizer, text = Tokenizer.from_buffer(byte_level("<s>")), "The quick brown fox jumps over the lazy dog."
    prompts = [Prompt(1, text, None), Prompt(2, None, [{"role": "user", "content": text}])]
    samples = make_samples(prompts, tokenizer, lambda messages: f"<s>{messages[0]['content']}")
    assert torch.equal(*samples) and samples[0].tolist().count(tokenizer.token_to_id("<s>")) == 1


class _Letters:
    def encode(self, text, add_special_tokens):
        return type("Encoding", (), {"ids": [1, 2]})()


def test_the_default_set_is_readable_and_small(model):
    prompts = read_prompts(DEFAULT)
    samples = make_samples(prompts, Tokenizer.from_file(str(model / "tokenizer.json")), lambda messages: "")
    assert len(prompts) == len(samples) == NUM_SAMPLES and DEFAULT.stat().st_size < 100_000


def test_many_prompts_are_sampled_evenly(tmp_path, model):
    path = tmp_path / "c.jsonl"
    path.write_text("".join(json.dumps({"text": f"number {index} " * 10}) + "\n" for index in range(1000)))
    samples = make_samples(read_prompts(path), Tokenizer.from_file(str(model / "tokenizer.json")), lambda messages: "")
    assert len(samples) == NUM_SAMPLES


@pytest.mark.parametrize(
    ("scheme", "group", "message"),
    [
        ("int3", None, "scheme 'int3': one of int8"),
        ("int4-awq", 48, "group 48: one of 32, 64, 128"),
        ("int8", 64, "leave --group away"),
        ("fp8", 64, "leave --group away"),
    ],
)
def test_schemes_and_groups(model, scheme, group, message):
    with pytest.raises(QuantizeError, match=message):
        plan(model, scheme, group)


def test_groups_that_do_not_divide(tmp_path):
    make_folder(tmp_path / "a", "llama2", hidden_size=64, intermediate_size=96)
    with pytest.raises(QuantizeError, match="group 64 does not divide the 96 inputs"):
        plan(tmp_path / "a", "int4-awq", 64)
    assert plan(tmp_path / "a", "int4-awq").settings.group == 32
    make_folder(tmp_path / "b", "llama2")
    with pytest.raises(QuantizeError, match="no group of 32, 64, 128 divides"):
        plan(tmp_path / "b", "int4-awq")


def test_a_quantized_model_is_not_quantized_again(model, tmp_path):
    quantize(plan(model, "int8"), tmp_path / "out")
    with pytest.raises(QuantizeError, match="already quantized .compressed-tensors"):
        plan(tmp_path / "out", "int4-rtn")
    (tmp_path / "out" / "config.json").write_bytes((model / "config.json").read_bytes())
    (tmp_path / "out" / "quantize_config.json").write_text("{}")
    with pytest.raises(QuantizeError, match="already quantized .gptq"):
        plan(tmp_path / "out", "int8")


def test_what_exists_is_not_overwritten(model, tmp_path):
    (tmp_path / "out").mkdir()
    with pytest.raises(QuantizeError, match="already exists"):
        quantize(plan(model, "int8"), tmp_path / "out")
    assert not list((tmp_path / "out").iterdir())


def test_a_broken_model_leaves_nothing(model, tmp_path):
    broken = tmp_path / "broken"
    broken.mkdir()
    for path in model.iterdir():
        (broken / path.name).write_bytes(path.read_bytes())
    (broken / "model.safetensors").write_bytes((model / "model.safetensors").read_bytes()[:-1000])
    with pytest.raises(ModelError, match="truncated"):
        quantize(plan(broken, "int8"), tmp_path / "out")
    with pytest.raises(QuantizeError, match="no such model folder"):
        plan(tmp_path / "nothing", "int8")
    assert [path.name for path in tmp_path.iterdir()] == ["broken"]


def test_weights_that_are_not_numbers_are_refused(model, tmp_path):
    tensors = load_file(model / "model.safetensors")
    name = "model.layers.1.mlp.up_proj.weight"
    tensors[name][3, 5] = float("nan")
    save_file(tensors, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_bytes((model / "config.json").read_bytes())
    with pytest.raises(ModelError, match=f"{name} holds values that are NaN"):
        quantize(plan(tmp_path, "int8"), tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_models_without_weights_in_float_are_refused(model, tmp_path):
    tensors = load_file(model / "model.safetensors")
    name = "model.layers.0.mlp.up_proj.weight"
    save_file(tensors | {name: tensors[name].to(torch.int8)}, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_bytes((model / "config.json").read_bytes())
    with pytest.raises(ModelError, match=name):
        quantize(plan(tmp_path, "int8"), tmp_path / "out")
    assert not (tmp_path / "out").exists()
