"""`baton quantize` and `baton eval` from the command line."""

import json
import math
import os
import signal
import subprocess
import sys

import pytest
from tokenizers import Tokenizer
from tokenizers.processors import TemplateProcessing

from baton.cli.models import eval as evaluate
from baton.cli.models import quantize
from baton.quantization import schemes
from tests.cli.models.calls import call
from tests.support.gateway.small_tokenizers import byte_level
from tests.support.model_folders.models_hard_to_quantize import make_demo_like


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return make_demo_like(tmp_path_factory.mktemp("models") / "float")


def test_the_schemes_offered_are_the_schemes_made():
    assert tuple(schemes.SCHEMES) == quantize.SCHEMES


def test_quantize_and_eval(model, tmp_path, capsys):
    out, text = tmp_path / "out", tmp_path / "text"
    text.write_text("The quick brown fox jumps over the lazy dog.\n" * 40)
    assert call(quantize, "--model", model, "--out", out, "--scheme", "int4-gptq", "--group", 32) == 0
    printed = capsys.readouterr()
    assert f"{out}: int4-gptq, groups of 32, " in printed.out and not printed.err, "bars are for terminals"
    assert json.loads((out / "config.json").read_text())["quantization_config"]["format"] == "pack-quantized"
    assert {"tokenizer.json", "generation_config.json"} <= {path.name for path in out.iterdir()}

    assert call(evaluate, "--model", out, "--text", text, "--against", model, "--json") == 0
    figures = json.loads(capsys.readouterr().out)
    assert figures["num_bytes"] == text.stat().st_size and figures["kv_form"] == "bf16"
    nats = math.log(figures["perplexity"]) * figures["num_tokens"]
    assert figures["bits_per_byte"] == pytest.approx(nats / math.log(2) / figures["num_bytes"], rel=1e-3)
    assert 0 < figures["top1_agreement"] < 1 and figures["against_bits_per_byte"] > 0


@pytest.mark.parametrize(
    "options",
    (["--kv-dtype", "int4"], ["--kv-dtype", "fp8_e4m3"], ["--kv-dtype", "fp8"], ["--quantization", "int8"]),
    ids=lambda options: options[1],
)
def test_eval_of_stored_forms(model, tmp_path, capsys, options):
    text = tmp_path / "text"
    text.write_text("def read(path):\n    return path.read_text()\n" * 20)
    figures = []
    for chosen in ([], options):
        assert call(evaluate, "--model", model, "--text", text, "--against", model, "--json", *chosen) == 0
        figures.append(json.loads(capsys.readouterr().out))
    plain, found = figures
    assert found["kv_form"] == {"fp8": "fp8_e4m3", "int8": "bf16"}.get(options[1], options[1])
    assert plain["top1_agreement"] == 1 and plain["bits_per_byte"] == plain["against_bits_per_byte"]
    assert found["bits_per_byte"] != plain["bits_per_byte"]
    assert found["bits_per_byte"] == pytest.approx(plain["bits_per_byte"], rel=0.1)


def test_calibration_on_ones_own_prompts(model, tmp_path, capsys):
    """Conversations go through the model's chat template."""
    prompts = tmp_path / "prompts.jsonl"
    message = {"role": "user", "content": "The quick brown fox jumps over the lazy dog. " * 3}
    records = [{"messages": [message]}, {"prompt": "import pathlib\n" * 9}]
    prompts.write_text("".join(json.dumps(record) + "\n" for record in records))
    words = ("--model", model, "--scheme", "smoothquant-w8a8", "--calibration", prompts)
    assert call(quantize, *words, "--out", tmp_path / "a") == 0
    prompts.write_text("nonsense\n")
    assert call(quantize, *words, "--out", tmp_path / "b") == 2
    assert capsys.readouterr().err.strip().endswith("line 1: not JSON (Expecting value); each line is an object")
    assert not (tmp_path / "b").exists()


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--scheme", "int3"], "--scheme int3: one of int8"),
        (["--scheme", "int4-awq", "--group", "33"], "group 33: one of 32, 64, 128"),
        (["--scheme", "int8", "--out", "."], "already exists"),
        (["--scheme", "int8", "--model", "nowhere"], "nowhere: no such model folder"),
        (["--scheme", "int4-awq", "--calibration", "nowhere"], "nowhere: not readable"),
        (["--scheme", "int8", "--calibration", "nowhere"], "scheme int8 is not calibrated"),
    ],
)
def test_wrong_use_of_quantize(model, tmp_path, capsys, words, message):
    assert call(quantize, "--model", model, "--out", tmp_path / "out", *words) == 2
    error = capsys.readouterr().err
    assert message in error and error.count("\n") == 1 and not list(tmp_path.iterdir())


@pytest.mark.parametrize(("single", "begins"), [("<|im_start|> $A", ["<|im_start|>"]), ("$A", ["</s>"])])
def test_texts_begin_as_the_tokenizer_has_it(tmp_path, single, begins):
    """Gemma 3's config.json names ends alone; its tokenizer puts BOS before a text."""
    folder = make_demo_like(tmp_path / "model")
    tokenizer = Tokenizer.from_buffer(byte_level())
    names = ("<|im_start|>", "</s>")
    special = [(name, tokenizer.token_to_id(name)) for name in names]
    tokenizer.post_processor = TemplateProcessing(single=single, special_tokens=special)
    tokenizer.save(str(folder / "tokenizer.json"))
    config = json.loads((folder / "config.json").read_text()) | {"eos_token_id": [dict(special)["</s>"]]}
    config.pop("bos_token_id", None)
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "generation_config.json").unlink(missing_ok=True)
    (ids,) = evaluate.encode(folder, evaluate.Texts("x", ["the fox"]))
    text = tokenizer.encode("the fox", add_special_tokens=False).ids
    assert ids == [*(tokenizer.token_to_id(name) for name in begins), *text]


def test_a_gguf_file_is_not_scored(tmp_path, capsys):
    (tmp_path / "model.gguf").write_bytes(b"GGUF")
    assert call(evaluate, "--model", tmp_path / "model.gguf") == 2
    assert f"{tmp_path / 'model.gguf'}: a .gguf file is not scored" in capsys.readouterr().err


@pytest.mark.parametrize("command", [quantize, evaluate])
def test_threads_are_counted_from_one(model, tmp_path, capsys, command):
    with pytest.raises(SystemExit) as caught:
        call(command, "--model", model, "--out", tmp_path / "out", "--scheme", "int8", "--threads", "0")
    assert caught.value.code == 2
    assert "--threads: '0' is not a whole number above 0" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--model", "nowhere"], "nowhere"),
        (["--text", "nowhere"], "nowhere: not readable"),
        (["--kv-dtype", "int3"], "int3"),
        (["--quantization", "int3"], "int3"),
        (["--against", "nowhere"], "nowhere"),
    ],
)
def test_wrong_use_of_eval(model, capsys, words, message):
    assert call(evaluate, "--model", model, *words) == 2
    error = capsys.readouterr().err
    assert message in error.splitlines()[-1]


def test_an_empty_text(model, tmp_path, capsys):
    (tmp_path / "text").write_text(" \n")
    assert call(evaluate, "--model", model, "--text", tmp_path / "text") == 2
    assert "empty" in capsys.readouterr().err


def test_held_out_text_is_there():
    """The modules of this machine, and a text for machines that have none."""
    assert evaluate.read_texts(None).num_bytes > 100_000
    assert len(evaluate.SHIPPED_TEXT.read_text()) > 1000


def test_terminated_leaves_nothing(model, tmp_path):
    """SIGTERM in the middle: exit status 1, and neither the folder nor its beginnings."""
    slow = (
        "import sys, time\n"
        "from baton.quantization import quantize as module\n"
        "make = module.Block\n"
        "module.Block = lambda *args: (print('layer', flush=True), time.sleep(30), make(*args))[-1]\n"
        "from baton.cli.main import main\n"
        "sys.exit(main())\n"
    )
    words = ["quantize", "--model", model, "--out", tmp_path / "out", "--scheme", "int8"]
    command = [sys.executable, "-c", slow, *map(str, words)]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    assert process.stdout.readline() == b"layer\n"
    assert any(path.name.startswith(".out.") for path in tmp_path.iterdir())
    os.kill(process.pid, signal.SIGTERM)
    _, error = process.communicate(timeout=60)
    assert process.returncode == 1 and b"was not made" in error
    assert not list(tmp_path.iterdir())
