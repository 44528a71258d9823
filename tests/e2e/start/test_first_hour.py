"""The commands of README and quickstarts, word for word, in a network of their own, where port 50051 is free and names
lead here."""

import os
import re
import subprocess
from pathlib import Path

import pytest

from tests.support.pace import patience
from tests.support.process import ROOT

_ALONE = ("unshare", "--map-root-user", "--net", "--mount", "--pid", "--fork", "--kill-child")
_MAX_WORDS = 120  # that a newcomer reads before the first token

pytestmark = pytest.mark.skipif(
    subprocess.run([*_ALONE, "true"], capture_output=True).returncode != 0,
    reason="this system lets nobody make a network namespace",
)


def commands(page: str, first: str) -> list[str]:
    """The lines of the code block that begins with `first`, without their comments."""
    text = (ROOT / page).read_text()
    block = next(
        block for block in re.findall(r"(?:^    .+\n)+", text, re.MULTILINE) if block.strip().startswith(first)
    )
    return [line.partition("  #")[0].strip() for line in block.splitlines()]


def walk(lines: list[str], folder: Path, then: str = "") -> str:
    """Run them as one would type them: what serves goes to the background, and the next waits until it does. Returns
    what they print; `then` is run behind them."""
    script = ["set -e", "ip link set lo up", "mount --bind hosts /etc/hosts", f"cd {folder / 'here'}"]
    for line in lines:
        is_server = re.search(r"\bbaton up\b", line) is not None
        script.append(f"{line.removesuffix('&')} > >(tee ready) &" if is_server else line)
        if is_server:
            script.append("until grep -q ^ready ready 2>/dev/null; do kill -0 $! && sleep 0.2; done")
    (folder / "here").mkdir()
    (folder / "here" / ".venv").symlink_to(ROOT / ".venv")
    (folder / "hosts").write_text("127.0.0.1 localhost llm.example.net\n")
    env = {**os.environ, "PATH": f"{ROOT / '.venv' / 'bin'}:{os.environ['PATH']}", "OMP_NUM_THREADS": "1"}
    argv = [*_ALONE, "bash", "-c", "\n".join([*script, then])]
    done = subprocess.run(argv, cwd=folder, env=env, capture_output=True, text=True, timeout=patience(90))
    assert done.returncode == 0, f"{lines}\n{done.stdout}\n{done.stderr}"
    return done.stdout


def test_the_commands_of_the_readme_work(tmp_path):
    lines = commands("README.md", ". .venv/bin/activate")
    assert len(lines) == 3
    told = walk(lines, tmp_path)
    assert re.match(r"ready grpc=127\.0\.0\.1:50051 .*\n", told) and len(told.partition("\n")[2].split()) > 5


def test_tls_in_three_commands(tmp_path):
    lines = commands("docs/security.md", "baton certs")
    assert len(lines) == 3
    told = walk(lines, tmp_path)
    assert "fleet=127.0.0.1:" in told and len(told.splitlines()[-1]) > 5


def test_settings_in_a_file(tmp_path):
    lines = commands("docs/operations.md", "baton config")
    told = walk(lines, tmp_path, "baton top --once")
    assert told.count("\ndecode ") == 2 and told.count("\nprefill ") == 1


def test_few_words_before_the_first_token():
    before = (ROOT / "README.md").read_text().partition("make demo")[0]
    assert len(before.split()) < _MAX_WORDS
