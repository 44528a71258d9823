"""A wheel with kernels, installed where there is no compiler: the same bits as the library that is compiled here."""

import os
import platform
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from baton.engine import native
from baton.engine.native.tier import tiers_for
from tests.support.process import ROOT

pytestmark = [
    pytest.mark.long,
    pytest.mark.timeout(1800),
    pytest.mark.skipif(native.library() is None, reason=native.unavailable() or "there"),
]
# Prints the library's path, and the bits of products, attention and layers of a whole answer.
ANSWER = """
import hashlib, sys, torch
from pathlib import Path
from baton.engine import native
from baton.engine.core.config import EngineConfig
from baton.engine.core.request import Key, Request, RequestEnded, SamplingParams, TokenRun, PrefillDone
from baton.engine.engine import Engine

engine = Engine.load(EngineConfig(model=Path(sys.argv[1]), threads=1, num_blocks=64))
engine.submit(Request(Key("a"), tuple(range(5, 45)), 40, SamplingParams(temperature=0, logprobs=3), max_tokens=8))
said, ended = [], False
while not ended:
    for output in engine.step():
        said.append(repr(getattr(output, "first_tokens", getattr(output, "token_ids", None))))
        ended |= isinstance(output, RequestEnded)
print(native.library().path)
print(hashlib.sha256("".join(said).encode()).hexdigest())
"""


@pytest.fixture(scope="module")
def installed(tmp_path_factory) -> Path:
    """The wheel's files in a folder of their own."""
    folder = tmp_path_factory.mktemp("wheel")
    argv = [sys.executable, "-m", "pip", "--quiet", "wheel", "--no-deps", "--wheel-dir", folder, ROOT]
    subprocess.run(argv, env=os.environ | {"BATON_WHEEL_FOR": platform.machine()}, check=True)
    (wheel,) = folder.glob("baton_llm-*.whl")
    assert (
        wheel.stem.startswith("baton_llm-") and wheel.stem.endswith(platform.machine()) and "manylinux_2_" in wheel.stem
    )
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(folder / "site")
    return folder / "site"


def answer(folder: Path, **env: str) -> list[str]:
    """The two lines of ANSWER by the packages of a folder."""
    argv = [sys.executable, "-c", ANSWER, ROOT / "demo" / "target"]
    env = os.environ | {"PYTHONPATH": str(folder), "OMP_NUM_THREADS": "1"} | env
    done = subprocess.run(argv, cwd=folder, env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


def test_a_wheel_carries_every_tier_of_its_architecture(installed):
    libraries = installed / "baton" / "engine" / "native" / "libraries"
    assert {path.stem for path in libraries.iterdir()} == {tier.name for tier in tiers_for(platform.machine())}


def test_without_a_compiler_it_answers_as_a_checkout_does(installed, tmp_path):
    path, bits = answer(installed, CXX="/no/compiler", BATON_CACHE=str(tmp_path / "empty"))
    assert Path(path).is_relative_to(installed) and not (tmp_path / "empty").exists()
    ours, our_bits = answer(ROOT)
    assert not Path(ours).is_relative_to(installed) and bits == our_bits
