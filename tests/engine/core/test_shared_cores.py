"""Workers of one host divide its cores and lend idle ones; who dies leaves his part to the others."""

import random
import re
import subprocess
import sys

import pytest

from baton import system
from baton.engine.core import shared_cores
from baton.engine.core.shared_cores import NUM_PLACES, SharedCores
from tests.support.process import ROOT

DIES = """
import os, sys
from pathlib import Path
from baton.engine.core.shared_cores import SharedCores
print(SharedCores(Path(sys.argv[1])).take(is_long=True), flush=True)
sys.stdin.read()
os.kill(os.getpid(), 9)
"""

# At first there is no room for a page, then there is.
FULL = """
import sys
from pathlib import Path
from baton.engine.core.shared_cores import SharedCores
folder = Path(sys.argv[1])
for room in (False, False, True):
    if room:
        (folder / "fill").unlink()
    try:
        SharedCores(folder).close()
        print("shared")
    except OSError as error:
        print(error)
"""
# Runs a command with a full file system of 64 KiB at the folder in front of it.
IN_FULL_FOLDER = (
    "unshare", "--map-root-user", "--mount", "sh", "-c",
    'mount -t tmpfs -o size=64K tmpfs "$0" && head -c 64K /dev/zero > "$0/fill" && exec "$@"',
)  # fmt: skip


@pytest.fixture
def sixteen(monkeypatch):
    monkeypatch.setattr(system, "cores", lambda: list(range(16)))


def test_each_has_an_equal_part_and_one_at_least(tmp_path, sixteen):
    workers = []
    for num_workers in range(1, 21):
        workers.append(SharedCores(tmp_path))
        assert {each.share for each in workers} == {max(1, 16 // num_workers)}
    for each in workers:
        each.close()


def test_no_step_is_computed_by_more_than_the_idle_leave(tmp_path, sixteen):
    """Whoever began when. Only who was there before another one came may have taken what is its part now, until its step ends."""
    draw, computing, workers = random.Random(0), {}, [SharedCores(tmp_path) for _ in range(4)]
    for _ in range(2000):
        worker = draw.choice(workers)
        if worker in computing:
            worker.rest()
            del computing[worker]
            continue
        busy = sum(computing.values())
        is_long = draw.random() < 0.5
        taken = computing[worker] = worker.take(is_long)
        assert taken == (max(4, 16 - busy) if is_long else 4)
    for each in workers:
        each.close()


def test_the_place_of_one_that_died_is_free(tmp_path, sixteen, monkeypatch):
    monkeypatch.setattr(shared_cores, "LOOK_S", 0.0)
    argv = [
        sys.executable,
        "-c",
        "from baton import system; system.cores = lambda: list(range(16))\n" + DIES,
        str(tmp_path),
    ]
    with subprocess.Popen(argv, cwd=ROOT, text=True, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as other:
        assert other.stdout.readline() == "16\n"
        own = SharedCores(tmp_path)
        assert own.share == own.take(is_long=True) == 8, "it computes with all, and lives"
        other.stdin.close()
        other.wait()
    assert own.take(is_long=False) == 16
    own.close()


def test_who_may_use_other_cores_shares_none(tmp_path, sixteen, monkeypatch):
    own = SharedCores(tmp_path)
    monkeypatch.setattr(system, "cores", lambda: [16, 17])
    other = SharedCores(tmp_path)
    assert (own.share, other.share) == (16, 2)
    own.close(), other.close()


def test_a_folder_that_cannot_be_used_is_named(tmp_path):
    with pytest.raises(OSError, match="nowhere"):
        SharedCores(tmp_path / "nowhere")
    held = [SharedCores(tmp_path) for _ in range(NUM_PLACES)]
    with pytest.raises(OSError, match=f"all {NUM_PLACES} places are taken"):
        SharedCores(tmp_path)
    held.pop().close()
    SharedCores(tmp_path).close()
    for each in held:
        each.close()


def test_a_full_file_system_is_one_line(tmp_path):
    """Seen: SIGBUS at the first store, as the file had its size and no page; and so again at each start, as it stayed."""
    command = [*IN_FULL_FOLDER, tmp_path]
    if subprocess.run([*command, "true"], capture_output=True).returncode:
        pytest.skip("this system lets nobody mount a small file system")
    done = subprocess.run([*command, sys.executable, "-c", FULL, tmp_path], cwd=ROOT, capture_output=True, text=True)
    assert not done.returncode, done.stderr
    *refused, shared = done.stdout.splitlines()
    line = f"{tmp_path}/baton-cores-.*: No space left on device"
    assert [bool(re.fullmatch(line, each)) for each in refused] == [True, True] and shared == "shared"


def test_a_link_in_its_place_is_not_followed(tmp_path):
    own = SharedCores(tmp_path)
    own.close()
    (path,) = tmp_path.iterdir()
    path.unlink()
    (tmp_path / "other").write_bytes(b"keep me")
    path.symlink_to(tmp_path / "other")
    with pytest.raises(OSError):
        SharedCores(tmp_path)
    assert (tmp_path / "other").read_bytes() == b"keep me"
