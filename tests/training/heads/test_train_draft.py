"""`baton train-draft` from the command line to a folder that a worker loads."""

import argparse
import json
import shutil
import signal

import pytest
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer

from baton.cli.models import train_draft
from baton.engine.core.config import EngineConfig
from baton.engine.engine import Engine
from baton.training.model.trainer import Trainer
from tests.support.model_folders.learned_model import TEXT, make_learned_model


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return make_learned_model(tmp_path_factory.mktemp("model"))


@pytest.fixture
def text(tmp_path):
    path = tmp_path / "text.py"
    path.write_text(TEXT)
    return path


def parse(*words):
    parser = argparse.ArgumentParser()
    train_draft.add_parser(parser.add_subparsers())
    return parser.parse_args(["train-draft", *map(str, words)])


def call(*words):
    args = parse(*words)
    return args.run(args)


@pytest.mark.parametrize("kind", ["medusa", "eagle"])
def test_one_command_makes_heads_that_load(kind, model, text, tmp_path, capsys):
    out = tmp_path / "heads"
    command = ("--kind", kind, "--model", model, "--text", text, "--text", text, "--out", out, "--minutes", 0.02)
    assert call(*command) == 0
    assert "agrees with the target on" in capsys.readouterr().out
    engine = Engine.load(EngineConfig(model, speculator="auto", draft_model=out))
    assert list(engine.speculator.proposers) == ["ngram", kind]
    assert call(*command) == 2
    assert "already holds weights" in capsys.readouterr().err


def test_an_interrupted_run_goes_on(model, text, tmp_path, monkeypatch, capsys):
    out = tmp_path / "heads"
    command = ("--kind", "medusa", "--model", model, "--text", text, "--out", out, "--minutes", 0.02)

    def interrupt(*_):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr("baton.training.heads.heads.export_heads", interrupt)
        assert call(*command) == 1
    assert "--resume" in capsys.readouterr().err
    assert call(*command) == 2
    assert "unfinished" in capsys.readouterr().err
    assert call(*command, "--resume") == 0
    assert json.loads((out / "config.json").read_text())["speculator"] == "medusa"
    assert not (out / ".training").exists()


@pytest.fixture
def heeds_ctrl_c():
    """Where the tests run in the background it is ignored, and then by the program too."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.usefixtures("heeds_ctrl_c")
def test_ctrl_c_keeps_what_was_learned(model, text, tmp_path, monkeypatch, capsys):
    """Also before the first two minutes are over, amid a step, which ends first."""
    out, ends = tmp_path / "heads", []
    command = ("--kind", "medusa", "--model", model, "--text", text, "--out", out, "--minutes", 0.02)
    step = Trainer._step

    def interrupted(trainer):
        signal.raise_signal(signal.SIGINT)
        step(trainer)
        ends.append(trainer.num_steps)

    with monkeypatch.context() as patch:
        patch.setattr(Trainer, "_step", interrupted)
        assert call(*command) == 1
    assert "--resume" in capsys.readouterr().err and ends == [1]
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    with safe_open(out / ".training" / "medusa.safetensors", "pt") as file:
        assert json.loads(file.metadata()["counters"])[1] == 1
    assert call(*command, "--resume") == 0


@pytest.mark.usefixtures("heeds_ctrl_c")
def test_a_second_ctrl_c_does_not_wait_for_the_step(model, text, tmp_path, monkeypatch):
    def interrupted(_):
        signal.raise_signal(signal.SIGINT)
        signal.raise_signal(signal.SIGINT)
        raise AssertionError("it went on")

    monkeypatch.setattr(Trainer, "_step", interrupted)
    assert call("--kind", "medusa", "--model", model, "--text", text, "--out", tmp_path / "heads") == 1


def test_a_run_for_another_target_does_not_go_on(model, text, tmp_path, monkeypatch, capsys):
    """One of the same shape: heads learn what this target says next."""
    other, out = shutil.copytree(model, tmp_path / "other"), tmp_path / "heads"
    weights = load_file(other / "model.safetensors")
    weights["model.norm.weight"] *= 2
    save_file(weights, other / "model.safetensors", {"format": "pt"})
    command = ("--kind", "medusa", "--text", text, "--out", out, "--minutes", 0.02)

    def interrupt(*_):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr("baton.training.heads.heads.export_heads", interrupt)
        assert call(*command, "--model", model) == 1
    capsys.readouterr()
    assert call(*command, "--model", other, "--resume") == 1
    said = capsys.readouterr().err.splitlines()[-1]
    assert f"{out / '.training' / 'medusa.safetensors'} is of a run for another target" in said
    assert call(*command, "--model", model, "--resume") == 0


def test_bad_input_is_one_line(model, text, tmp_path, capsys):
    def fails(message, **changes):
        words = {"kind": "medusa", "model": model, "text": text, "out": tmp_path / "out", "minutes": 0.02} | changes
        assert call(*(word for key, value in words.items() for word in (f"--{key}", value))) == 1
        error = capsys.readouterr().err
        assert error.startswith("baton train-draft: ") and error.count("\n") == 1 and message in error, error

    short, binary = tmp_path / "short.txt", tmp_path / "binary"
    short.write_text("x = 1\n")
    binary.write_bytes(b"\xff\xfe\x00")
    fails("at least 4096 are needed", text=short)
    fails("not UTF-8 text", text=binary)
    fails("missing.txt", text=tmp_path / "missing.txt")
    beyond = shutil.copytree(model, tmp_path / "beyond")
    tokenizer = Tokenizer.from_file(str(beyond / "tokenizer.json"))
    tokenizer.add_tokens([f"<{number}>" for number in range(300)])
    tokenizer.save(str(beyond / "tokenizer.json"))
    strange = tmp_path / "strange.txt"
    strange.write_text(TEXT * 8 + "<299>\n")
    fails(f"{beyond / 'tokenizer.json'}: token '<299>' has id", model=beyond, text=strange)
    fails("no such model folder", model=tmp_path / "nothing")
    for words in (("--kind", "hydra"), ("--kind", "eagle", "--model", model, "--out", tmp_path, "--minutes", 0)):
        with pytest.raises(SystemExit) as stop:
            parse(*words)
        assert stop.value.code == 2
