"""Workers of one host divide its cores and lend idle ones; who dies leaves his part to the others."""

import os
import random
import re
import subprocess
import sys

import pytest

from baton import system
from baton.engine.core import shared_cores
from baton.engine.core.shared_cores import NUM_SLOTS, SharedCores
from tests.support.process import ROOT

DIES = """
import os, sys
from pathlib import Path
from baton.engine.core.shared_cores import SharedCores
print(SharedCores(Path(sys.argv[1])).claim(is_long=True), flush=True)
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
    monkeypatch.setattr(system, "cpu_quota", lambda: None)


def test_each_has_an_equal_part_and_one_at_least(tmp_path, sixteen):
    workers = []
    for num_workers in range(1, 21):
        workers.append(SharedCores(tmp_path))
        assert {each.share for each in workers} == {max(1, 16 // num_workers)}
    for each in workers:
        each.close()


def test_no_step_is_computed_by_more_than_the_idle_leave(tmp_path, sixteen):
    """Whoever began when. Only who was there before another one came may have taken what is its part now, until its
    step ends."""
    draw, computing, workers = random.Random(0), {}, [SharedCores(tmp_path) for _ in range(4)]
    for _ in range(2000):
        worker = draw.choice(workers)
        if worker in computing:
            worker.rest()
            del computing[worker]
            continue
        busy = sum(computing.values())
        is_long = draw.random() < 0.5
        taken = computing[worker] = worker.claim(is_long)
        assert taken == (max(4, 16 - busy) if is_long else 4)
    for each in workers:
        each.close()


def test_the_place_of_one_that_died_is_free(tmp_path, sixteen, monkeypatch):
    monkeypatch.setattr(shared_cores, "LOOK_S", 0.0)
    argv = [
        sys.executable,
        "-c",
        "from baton import system; system.cores = lambda: list(range(16)); system.cpu_quota = lambda: None\n" + DIES,
        str(tmp_path),
    ]
    with subprocess.Popen(argv, cwd=ROOT, text=True, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as other:
        assert other.stdout.readline() == "16\n"
        own = SharedCores(tmp_path)
        assert own.share == own.claim(is_long=True) == 8, "it computes with all, and lives"
        other.stdin.close()
        other.wait()
    assert own.claim(is_long=False) == 16
    own.close()


def test_who_may_use_other_cores_shares_none(tmp_path, sixteen, monkeypatch):
    own = SharedCores(tmp_path)
    monkeypatch.setattr(system, "cores", lambda: [16, 17])
    other = SharedCores(tmp_path)
    assert (own.share, other.share) == (16, 2)
    own.close(), other.close()


def test_those_of_one_quota_divide_it_and_leave_the_host_to_others(tmp_path, sixteen, monkeypatch):
    """Two containers that may use 6 and 4 of 16 cores, with two workers and one, and a worker beside them."""
    workers = {}
    for name, quota in (("a1", (6, 70)), ("a2", (6, 70)), ("b", (4, 7)), ("free", None), ("as many", (16, 9))):
        monkeypatch.setattr(system, "cpu_quota", lambda quota=quota: quota and system.CpuQuota(*quota))
        workers[name] = SharedCores(tmp_path)
    shares = {name: each.share for name, each in workers.items()}
    assert shares == {"a1": 3, "a2": 3, "b": 3, "free": 3, "as many": 3}
    assert [workers[name].num_cores for name in ("a1", "b", "free", "as many")] == [6, 4, 16, 16]
    workers.pop("as many").close()
    assert {name: each.share for name, each in workers.items()} == {"a1": 3, "a2": 3, "b": 4, "free": 4}
    assert workers["a1"].claim(is_long=True) == 6, "which no other of its container uses"
    assert workers["a2"].claim(is_long=True) == 3, "its part, though others of the host are idle"
    assert workers["b"].claim(is_long=True) == 4
    assert workers["free"].claim(is_long=True) == 4, "the others compute with 13"
    workers["a1"].rest()
    assert workers["free"].claim(is_long=True) == 9
    for each in workers.values():
        each.close()


def test_a_folder_that_cannot_be_used_is_named(tmp_path):
    with pytest.raises(OSError, match="nowhere"):
        SharedCores(tmp_path / "nowhere")
    held = [SharedCores(tmp_path) for _ in range(NUM_SLOTS)]
    with pytest.raises(OSError, match=f"all {NUM_SLOTS} slots are taken"):
        SharedCores(tmp_path)
    held.pop().close()
    SharedCores(tmp_path).close()
    for each in held:
        each.close()


def test_a_full_file_system_is_one_line(tmp_path):
    """Seen: SIGBUS at the first store, as the file had its size and no page; and so again at each start, as it
    stayed."""
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


def test_a_file_that_another_user_has_put_there_is_not_shared(tmp_path, sixteen, monkeypatch):
    """Seen: its owner cut it, again and again, and each time all workers were killed by SIGBUS."""
    other = os.getuid() + 1
    (tmp_path / f"baton-cores-{other}-ffff").touch()
    monkeypatch.setattr(os, "getuid", lambda: other)
    with pytest.raises(OSError, match=f"baton-cores-{other}-ffff is another user's"):
        SharedCores(tmp_path)
