"""The name of the code that decides the bits of KV."""

import shutil

import pytest

from baton.engine.core import reproducible
from baton.engine.core.config import EngineConfig
from baton.engine.engine import Engine
from baton.engine.models import decoder
from kvtransfer.compatible import MIXED, relation
from kvtransfer.errors import LayoutMismatch
from tests.support.model_folders.families import make_few_heads


def test_workers_whose_code_differs_are_told_apart(tmp_path, monkeypatch):
    """On a CPU too: mixtures whose routers one build rounds and another reads as they are had one class, and other
    bits."""
    (tmp_path / "model").mkdir()
    make_few_heads(tmp_path / "model")
    config = EngineConfig(tmp_path / "model", device="cpu", block_size=16, num_blocks=4, max_model_len=64)
    engine = Engine.load(config)
    ours, layout = str(engine.numerics_class), engine.layout
    shutil.copytree(reproducible.ENGINE / "models", tmp_path / "engine" / "models")
    names = [reproducible.computing_code(tmp_path / "engine")]
    experts = tmp_path / "engine" / "models" / "experts.py"
    experts.write_text(experts.read_text().replace("source.exact(", "source.tensor("))
    names.append(reproducible.computing_code.__wrapped__(tmp_path / "engine"))
    (tmp_path / "engine" / "models" / "notes.txt").touch()
    names.append(reproducible.computing_code.__wrapped__(tmp_path / "engine"))
    assert names[0] != names[1] == names[2]
    monkeypatch.setattr(decoder, "computing_code", lambda: names[1])
    theirs = str(engine.numerics_class)
    assert relation(layout, ours, layout, theirs) == MIXED
    with pytest.raises(LayoutMismatch, match="strict numerics: another numerics class"):
        relation(layout, ours, layout, theirs, is_strict=True)
