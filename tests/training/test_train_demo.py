"""`baton train-demo` from the command line to a folder that loads."""

import argparse
import json
from dataclasses import replace

import pytest

from baton.cli.models import train_demo
from baton.engine.core.config import EngineConfig
from baton.engine.engine import Engine
from baton.engine.models.loader import load_model
from baton.training import recipe


def parse(*words):
    parser = argparse.ArgumentParser()
    train_demo.add_parser(parser.add_subparsers())
    return parser.parse_args(["train-demo", *map(str, words)])


def call(*words):
    args = parse(*words)
    return args.run(args)


@pytest.fixture
def seconds_only(monkeypatch):
    """Training, and 4 of the held-out modules to measure it on, which are most of the time otherwise."""
    quick, gather = recipe.quick, recipe.gather
    monkeypatch.setattr(recipe, "quick", lambda: quick(minutes=0.015))

    def gather_few(**options):
        corpus = gather(**options)
        return replace(corpus, held_out=corpus.held_out[:4])

    monkeypatch.setattr(recipe, "gather", gather_few)


def test_one_command_makes_the_demo(tmp_path, capsys, seconds_only):
    out = tmp_path / "demo"
    assert call("--quick", "--threads", 1, "--out", out) == 0
    assert "bits per byte on held-out modules" in capsys.readouterr().out
    record = json.loads((out / "evaluation.json").read_text())
    assert record["evaluation"]["target_bits_per_byte"] < 8.0
    assert record["corpus"]["library"]["num_bytes"] <= 200_000
    for name in ("target", "draft", "medusa", "eagle"):
        assert (out / name / "model.safetensors").exists()
    assert not (out / ".training").exists()

    assert call("--quick", "--out", out) == 2
    assert "already holds a model" in capsys.readouterr().err

    assert call("--quick", "--threads", 1, "--out", out, "--qat") == 0
    assert json.loads((out / "target-int4" / "training.json").read_text())["num_steps"] > 0
    assert load_model(EngineConfig(out / "target-int4")).weights.form.startswith("int4-g32")
    assert not (out / ".training-int4").exists()
    assert call("--quick", "--out", out, "--qat") == 2
    assert "already holds target-int4" in capsys.readouterr().err


@pytest.mark.long
def test_a_mixture_and_an_adapter_beside_the_target(tmp_path, capsys, seconds_only):
    """Both are folders that the engine reads, and say what they reached."""
    out = tmp_path / "demo"
    assert call("--quick", "--threads", 1, "--out", out, "--mixture", "--adapter") == 0
    engine = Engine.load(EngineConfig(out / "mixture", num_blocks=16))
    assert (
        engine.spec.family == "qwen3_moe"
        and json.loads((out / "mixture" / "training.json").read_text())["bits_per_byte"] < 8
    )
    engine = Engine.load(EngineConfig(out / "target", adapter=(f"tabs={out / 'adapter'}",), num_blocks=16))
    figures = json.loads((out / "adapter" / "training.json").read_text())
    assert list(engine.adapters.listed()) == ["tabs"] and figures["num_steps"] > 0
    assert not list(out.glob(".training*"))
    assert call("--quick", "--out", out, "--mixture") == 2
    assert "already holds mixture" in capsys.readouterr().err


def test_an_interrupted_run_goes_on(tmp_path, monkeypatch, capsys, seconds_only):
    def interrupt(*_):
        raise KeyboardInterrupt

    out = tmp_path / "demo"
    with monkeypatch.context() as patch:
        patch.setattr(recipe.Run, "train_draft", interrupt)
        assert call("--quick", "--threads", 1, "--out", out) == 1
    assert "--resume" in capsys.readouterr().err
    assert call("--quick", "--out", out) == 2
    assert "unfinished" in capsys.readouterr().err
    weights = (out / "target" / "model.safetensors").read_bytes()
    assert call("--quick", "--threads", 1, "--resume", "--out", out) == 0
    assert (out / "target" / "model.safetensors").read_bytes() == weights


def test_wrong_use_is_said_in_one_line(tmp_path, capsys):
    assert call("--quick", "--minutes", 5, "--out", tmp_path) == 2
    assert capsys.readouterr().err.count("\n") == 1
    for words in (("--minutes", "0"), ("--threads", "0"), ("--minutes", "soon")):
        with pytest.raises(SystemExit) as stop:
            parse(*words)
        assert stop.value.code == 2


def test_a_folder_that_cannot_be_written_fails_clearly(tmp_path, capsys, seconds_only):
    (tmp_path / "file").write_text("")
    assert call("--quick", "--out", tmp_path / "file") == 1
    assert capsys.readouterr().err.startswith("baton train-demo: ")
