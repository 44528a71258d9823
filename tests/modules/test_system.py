"""What stands in for Linux elsewhere, chosen here: memory that another process maps, cores, sizes."""

import ctypes
import os
import pwd
import subprocess
import sys
import threading
import time
from collections.abc import Mapping
from pathlib import Path

import psutil
import pytest

from baton import system
from kvtransfer.memory.region import Region

# What /proc/self/cgroup has, of version 1 in a container, whose own group is where the host's would be mounted, and of
# version 2.
IN_DOCKER = "12:memory:/docker/4f5\n4:cpu,cpuacct:/docker/4f5\n1:name=systemd:/docker/4f5\n0::/docker/4f5\n"
IN_SERVICE = "0::/system.slice/b.service\n"


@pytest.fixture(params=[True, False], ids=["linux", "elsewhere"], autouse=True)
def linux(request, monkeypatch):
    if request.param and not system.LINUX:
        pytest.skip("this is not Linux")
    monkeypatch.setattr(system, "LINUX", request.param)


def test_memory_that_another_process_reads():
    region = Region.create(10_000)
    region.memory[9_999] = 7
    handed = region.open_read_only()
    code = f"import mmap; print(mmap.mmap({handed}, 10_000, prot=mmap.PROT_READ)[9_999])"
    done = subprocess.run([sys.executable, "-c", code], pass_fds=[handed], capture_output=True, text=True, check=True)
    assert done.stdout == "7\n"
    with pytest.raises(OSError):
        os.write(handed, b"x")
    theirs = Region.map(handed, 10_000)
    assert theirs.memory[9_999] == 7 and theirs.memory.readonly
    theirs.close(), region.close()


def test_closed_regions_leave_no_descriptor():
    before = len(os.listdir("/dev/fd"))
    region = Region.create(4096)
    os.close(region.open_read_only())
    region.close()
    assert len(os.listdir("/dev/fd")) == before


def test_a_region_without_room_leaves_no_descriptor():
    before = len(os.listdir("/dev/fd"))
    with pytest.raises(OSError, match=r"^no room for KV of 1099511627776.0 MiB in memory: "):
        Region.create(1 << 60)
    assert len(os.listdir("/dev/fd")) == before


def test_a_file_has_room_for_what_is_reserved(tmp_path):
    with open(tmp_path / "file", "w+b") as file:
        system.reserve(file.fileno(), 256)
        assert os.fstat(file.fileno()).st_size == 256
        file.truncate(8192)
        system.reserve(file.fileno(), 8192)
        assert os.fstat(file.fileno()).st_blocks * 512 >= 8192 or not system.LINUX, "no hole is left"
        system.reserve(file.fileno(), 256)
        assert os.fstat(file.fileno()).st_size == 8192


def test_cores_and_memory():
    assert system.cores() == sorted(set(system.cores())) != []
    assert system.memory_bytes() > 0
    assert 1 <= system.num_cores() <= len(system.cores())


@pytest.fixture
def cgroups(tmp_path, monkeypatch):
    """Returns what writes the files of this process's groups: what /proc/self/cgroup says, then each file's text by its
    path."""

    def write(own: str | None, files: Mapping[str, str]) -> Path:
        if own is not None:
            (tmp_path / "own").write_text(own)
        for name, text in files.items():
            path = tmp_path / "mounted" / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text + "\n")
        return tmp_path / "mounted"

    monkeypatch.setattr(system, "_OWN_CGROUPS", tmp_path / "own")
    monkeypatch.setattr(system, "_CGROUPS", tmp_path / "mounted")
    return write


@pytest.mark.parametrize(
    "own, files, wanted",
    [
        ("0::/\n", {"memory.max": "max"}, 64 << 30),
        ("0::/\n", {"memory.max": str(2 << 30)}, 2 << 30),
        (IN_DOCKER, {"memory/memory.limit_in_bytes": str(2 << 30)}, 2 << 30),
        (IN_DOCKER, {"memory/memory.limit_in_bytes": str((1 << 63) - 4096)}, 64 << 30),
        (IN_SERVICE, {"system.slice/memory.max": str(8 << 30), "system.slice/b.service/memory.max": "max"}, 8 << 30),
        (None, {}, 64 << 30),
    ],
)
def test_a_groups_limit_is_all_the_memory_that_there_is(cgroups, monkeypatch, own, files, wanted):
    monkeypatch.setattr(os, "sysconf", {"SC_PAGE_SIZE": 4096, "SC_PHYS_PAGES": 16 << 20}.__getitem__)
    cgroups(own, files)
    assert system.memory_limit() == wanted


@pytest.mark.parametrize(
    "own, files, wanted",
    [
        (None, {}, (0, 0)),
        ("0::/\n", {"cpu.max": "max 100000", "cpu.stat": "usage_usec 9\nnr_periods 0\nnr_throttled 0"}, (0, 0)),
        ("0::/\n", {"cpu.max": "50000 100000", "cpu.stat": "usage_usec 9\nnr_periods 8\nnr_throttled 5"}, (5, 8)),
        (
            IN_DOCKER,
            {
                "cpu/cpu.cfs_quota_us": "50000",
                "cpu/cpu.cfs_period_us": "100000",
                "cpu/cpu.stat": "nr_periods 3\nnr_throttled 2",
            },
            (2, 3),
        ),
    ],
)
def test_how_often_a_group_was_stopped_as_its_quota_was_used_up(cgroups, own, files, wanted):
    cgroups(own, files)
    assert system.throttled_periods() == wanted


@pytest.mark.parametrize(
    "own, files, wanted",
    [
        (None, {}, (0, 0)),
        ("0::/\n", {"memory.events": "oom 5\noom_kill 3\noom_group_kill 0", "pids.events": "max 7"}, (3, 7)),
        ("0::/\n", {"memory.events": "\na line of words\noom_kill 3", "pids.events": "max many\n"}, (3, 0)),
        (
            "4:memory:/docker/a\n3:pids:/docker/a\n",
            {"memory/memory.oom_control": "under_oom 0\noom_kill 2", "pids/pids.events": "max 1"},
            (2, 1),
        ),
        # What is around it counts what its neighbours meet.
        (IN_SERVICE, {"memory.events": "oom_kill 9", "system.slice/b.service/memory.events": "oom_kill 1"}, (1, 0)),
    ],
)
def test_what_a_groups_limits_have_ended_and_refused(cgroups, own, files, wanted):
    cgroups(own, files)
    assert system.group_events() == wanted


@pytest.mark.parametrize(
    "own, files, wanted",
    [
        ("0::/\n", {}, None),
        ("0::/\n", {"cpu.max": "max 100000"}, None),
        ("0::/\n", {"cpu.max": "400000 100000"}, (4, "")),
        ("0::/\n", {"cpu.max": "250000 100000"}, (3, "")),
        ("0::/\n", {"cpu.max": "50000 100000"}, (1, "")),
        ("0::/../neighbour\n", {"cpu.max": "400000 100000"}, (4, "")),
        (
            IN_SERVICE,
            {
                "system.slice/b.service/cpu.max": "800000 100000",
                "system.slice/cpu.max": "200000 50000",
                "cpu.max": "max 100000",
            },
            (4, "system.slice"),
        ),
        (IN_DOCKER, {"cpu/cpu.cfs_quota_us": "-1", "cpu/cpu.cfs_period_us": "100000"}, None),
        (IN_DOCKER, {"cpu/cpu.cfs_quota_us": "150000", "cpu/cpu.cfs_period_us": "100000"}, (2, "cpu")),
        (None, {}, None),
    ],
)
def test_a_groups_quota_is_all_the_cores_that_there_are(cgroups, monkeypatch, own, files, wanted):
    monkeypatch.setattr(system, "cores", lambda: list(range(64)))
    mounted = cgroups(own, files)
    if wanted is None:
        assert (system.cpu_quota(), system.num_cores()) == (None, 64)
        return
    cores, group = wanted
    assert system.cpu_quota() == (cores, (mounted / group).stat().st_ino)
    assert system.num_cores() == cores
    monkeypatch.setattr(system, "cores", lambda: [5])
    assert system.num_cores() == 1


def test_threads_by_name():
    """And those that they start, which are of the same name."""
    stop, names = threading.Event(), []

    def run() -> None:
        system.name_thread("reader-of-sum")
        sum(range(1_000_000))
        names.append(1)
        stop.wait()

    thread = threading.Thread(target=run)
    thread.start()
    while not names:
        time.sleep(0.001)
    found = system.thread_times(os.getpid())
    stop.set(), thread.join()
    assert found.get("worker-of-tes", found.get("reader-of-sum", 0)) > 0 if system.LINUX else found == {}


@pytest.mark.skipif(not hasattr(ctypes.CDLL(None), "malloc_trim"), reason="malloc is not glibc's")
def test_what_malloc_holds_in_vain_is_given_back():
    """Of 64 MiB in pieces of 10,000 bytes the last stays, behind which malloc by itself gives nothing back."""
    pieces = [bytes(10_000) for _ in range(6_700)]
    del pieces[:-1]
    held = psutil.Process().memory_info().rss
    system.trim_heap()
    assert held - psutil.Process().memory_info().rss > 40 << 20


@pytest.mark.skipif(not hasattr(ctypes.CDLL(None), "mallinfo2"), reason="malloc is not glibc's of 2.33 or later")
def test_what_malloc_has_in_use_is_told_apart_from_what_it_holds():
    """Of 64 MiB in pieces of 10,000 bytes the last stays."""
    before = system.heap_bytes()
    pieces = [bytes(10_000) for _ in range(6_700)]
    full = system.heap_bytes()
    del pieces[:-1]
    after = system.heap_bytes()
    assert full["used"] - before["used"] > 60 << 20
    assert full["used"] - after["used"] > 60 << 20
    assert after["free"] - full["free"] > 60 << 20


def test_a_user_without_a_home(monkeypatch):
    """By setpriv, chroot or `env -i`, with no line in /etc/passwd."""
    monkeypatch.setenv("HOME", "/home/me")
    assert system.with_home("~/.cache") == Path("/home/me/.cache")
    monkeypatch.delenv("HOME")
    monkeypatch.setattr(pwd, "getpwuid", {}.__getitem__)
    assert system.with_home("~/.cache") == Path("/nonexistent/.cache")
    assert system.with_home("/var/cache") == Path("/var/cache")
    monkeypatch.setattr(pwd, "getpwnam", {}.__getitem__)
    assert system.with_home("~nobody-here/cache") == Path("~nobody-here/cache")
