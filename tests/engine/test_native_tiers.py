"""Choose the instruction tier of native kernels, build a library for it, and keep it in the cache."""

import errno
import fcntl
import io
import os
import platform
import pwd
import shutil
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch

from baton.engine import native
from baton.engine.layers.linear.packed import ARGUMENTS, PackedLinear
from baton.engine.native import build, compiler
from baton.engine.native.tier import TIERS as ALL_TIERS
from baton.engine.native.tier import available, missing, tiers_for, tiers_of
from tests.support.model_folders.weight_forms import FORMS
from tests.support.pace import patience

TIERS = [tier for tier in ALL_TIERS if tier.machine == platform.machine()]
NAMES = [tier.name for tier in tiers_for("x86_64")]
V3 = "fpu avx avx2 fma f16c bmi1 bmi2 abm movbe"
V4 = f"{V3} avx512f avx512bw avx512cd avx512dq avx512vl"
OWN = available()


@pytest.mark.parametrize(
    ("flags", "count"),
    [
        ("fpu avx", 0),
        (V3.replace("f16c", ""), 0),
        (V3, 1),
        (f"{V3} avx512_vnni avx512_bf16", 1),
        (V4, 2),
        (f"{V4} avx512_vnni", 3),
        (f"{V4} avx512_vnni avx512_bf16 amx_tile", 4),
        (f"{V4} avx512_vnni avx512_bf16 amx_tile amx_int8 amx_bf16", 5),
    ],
)
def test_tiers_of_a_processor(flags, count):
    cpuinfo = f"processor\t: 0\nmodel name\t: x\nflags\t\t: {flags}\nbugs\t\t:\n\nprocessor\t: 1\nflags\t\t: fpu\n"
    assert [tier.name for tier in tiers_of(cpuinfo, "x86_64")] == NAMES[:count]


@pytest.mark.parametrize(
    ("features", "names"),
    [
        ("fp asimd fphp", []),
        ("fp asimd asimddp", ["armv8.2-dotprod"]),
        ("fp asimd asimddp i8mm", ["armv8.2-dotprod"]),
        ("fp asimd asimddp i8mm bf16", ["armv8.2-dotprod", "armv8.6-i8mm-bf16"]),
    ],
)
def test_tiers_of_an_arm_processor(features, names):
    cpuinfo = f"processor\t: 0\nBogoMIPS\t: 50.00\nFeatures\t: {features}\nCPU part\t: 0xd0c\n"
    assert [tier.name for tier in tiers_of(cpuinfo, "aarch64")] == names


def test_an_architecture_without_kernels(monkeypatch):
    monkeypatch.delenv("BATON_ISA", raising=False)
    monkeypatch.setattr(platform, "machine", lambda: "riscv64")
    assert not available() and missing() == "there are no kernels for riscv64"


def test_a_cap_is_kept(monkeypatch):
    monkeypatch.setenv("BATON_ISA", TIERS[0].name)
    assert available() == OWN[:1]


@pytest.mark.parametrize(("permitted", "count"), [(True, 5), (False, 4)])
def test_tiles_that_linux_does_not_permit_are_not_taken(tmp_path, monkeypatch, permitted, count):
    cpuinfo = tmp_path / "cpuinfo"
    cpuinfo.write_text(f"flags\t\t: {V4} avx512_vnni avx512_bf16 amx_tile amx_int8 amx_bf16\n")
    monkeypatch.delenv("BATON_ISA", raising=False)
    monkeypatch.setattr("baton.engine.native.tier.CPUINFO", cpuinfo)
    monkeypatch.setattr(platform, "machine", lambda: "x86_64")
    monkeypatch.setattr("baton.engine.native.tier.tiles_permitted", lambda: permitted)
    assert [found.name for found in available()] == NAMES[:count]


def test_a_wrong_cap_is_one_line(monkeypatch):
    monkeypatch.setenv("BATON_ISA", "sse9")
    with pytest.raises(ValueError, match=f"^BATON_ISA=sse9: one of {', '.join(tier.name for tier in TIERS)}$"):
        available()


def test_below_every_tier_there_is_no_library(monkeypatch):
    monkeypatch.delenv("BATON_NATIVE", raising=False)
    monkeypatch.setattr(build, "available", list)
    library, reason = build._load.__wrapped__()
    assert library is None and reason == f"this processor has no {TIERS[0]}"


@pytest.mark.skipif(native.library() is None, reason=native.unavailable() or "there")
@pytest.mark.timeout(900)
@pytest.mark.parametrize(
    "tier",
    [pytest.param(tier, marks=[pytest.mark.long] * (tier is not TIERS[-1])) for tier in TIERS if tier not in OWN],
    ids=lambda tier: tier.name,
)
def test_tiers_that_this_machine_lacks_compile(tier, tmp_path, monkeypatch):
    """Those that it has are compiled by what runs them. Not optimized, which takes a fifth of the time."""
    monkeypatch.setenv("BATON_CACHE", str(tmp_path))
    monkeypatch.setattr(compiler, "FLAGS", tuple(flag for flag in compiler.FLAGS if flag != "-O3"))
    assert tier.name in build.built(compiler.find(), tier).name


@pytest.mark.skipif(not (build.available() and compiler.find()), reason="nothing is compiled here")
def test_where_nothing_can_be_written_it_is_said_what_to_do(tmp_path, monkeypatch):
    (tmp_path / "file").touch()
    monkeypatch.setenv("BATON_CACHE", str(tmp_path / "file" / "cache"))
    monkeypatch.setenv("BATON_NATIVE", "on")
    library, reason = build._load.__wrapped__()
    assert library is None and reason.endswith("; BATON_CACHE=DIR names a folder that can be written")


def test_a_user_without_a_home_is_told_what_to_do(monkeypatch):
    """A traceback at the start of each worker."""
    for name in ("BATON_CACHE", "XDG_CACHE_HOME", "HOME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(pwd, "getpwuid", {}.__getitem__)
    monkeypatch.setattr(Path, "mkdir", refuse)  # as it is for all but root
    monkeypatch.setattr(compiler, "find", lambda: ["g++"])
    library, reason = build._load.__wrapped__()
    assert library is None and reason.endswith("'/nonexistent'; BATON_CACHE=DIR names a folder that can be written")


def refuse(path: Path, **options) -> None:
    raise PermissionError(errno.EACCES, "Permission denied", "/nonexistent")


@pytest.mark.parametrize(
    "damage",
    [
        lambda whole: b"",
        lambda whole: whole[:-1],
        lambda whole: whole[: len(whole) // 2] + bytes(len(whole) - len(whole) // 2),
    ],
    ids=["empty", "cut", "zeros"],
)
def test_what_is_torn_in_the_cache_is_built_again(damage, tmp_path, monkeypatch):
    """By a loss of power, or a copy that broke off: each worker died of SIGBUS at each start."""
    monkeypatch.setenv("BATON_CACHE", str(tmp_path))
    builds = []

    def compiled(command, flags, folder: Path) -> Path:
        builds.append(command)
        return Path(shutil.copy(__file__, folder))

    monkeypatch.setattr(compiler, "compiled", compiled)
    path = build.built(["g++"], TIERS[0])
    whole = path.read_bytes()
    assert build.built(["g++"], TIERS[0]) == path and len(builds) == 1
    path.write_bytes(damage(whole))
    assert build.built(["g++"], TIERS[0]) == path and len(builds) == 2 and path.read_bytes() == whole


def test_what_a_killed_build_left_goes_with_the_next(tmp_path, monkeypatch):
    """Not the folder of another host, which may share the cache without sharing locks, and build in it now."""
    monkeypatch.setenv("BATON_CACHE", str(tmp_path))
    monkeypatch.setattr(compiler, "compiled", lambda command, flags, folder: Path(shutil.copy(__file__, folder)))
    path = build.built(["g++"], TIERS[0])
    path.unlink()
    left, elsewhere = (path.with_suffix(f".{host}.build") for host in (os.uname().nodename, "elsewhere"))
    for folder in (left, elsewhere):
        folder.mkdir()
        (folder / "half.o").touch()
    assert build.built(["g++"], TIERS[0]) == path
    assert not left.exists() and (elsewhere / "half.o").exists()
    assert sorted(each.suffix for each in tmp_path.iterdir()) == [".build", ".lock", ".so"]


def test_a_build_whose_folder_was_removed_says_what_the_compiler_said(tmp_path, monkeypatch):
    def refuse_to_compile(command, flags, folder: Path) -> Path:
        shutil.rmtree(folder)
        raise subprocess.CalledProcessError(1, command, stderr="no such folder")

    monkeypatch.setenv("BATON_CACHE", str(tmp_path))
    monkeypatch.setattr(compiler, "compiled", refuse_to_compile)
    with pytest.raises(subprocess.CalledProcessError):
        build.built(["g++"], TIERS[0])


@pytest.mark.skipif(not build.available(), reason="no tier")
def test_a_compiler_that_fails_without_a_word_is_named(tmp_path, monkeypatch):
    """It ended the start with a traceback."""
    monkeypatch.setenv("BATON_CACHE", str(tmp_path))
    monkeypatch.setenv("CXX", str(script(tmp_path / "cxx", "echo >&2; exit 1")))
    library, reason = build._load.__wrapped__()
    assert library is None and "cxx" in reason and "non-zero exit status 1" in reason


def test_another_version_of_the_compiler_builds_again(tmp_path, monkeypatch):
    """One that was upgraded left the old library in use."""
    monkeypatch.setenv("BATON_CACHE", str(tmp_path))
    monkeypatch.setattr(compiler, "compiled", lambda command, flags, folder: Path(shutil.copy(__file__, folder)))
    cxx = tmp_path / "cxx"
    first, second = (build.built([str(script(cxx, f"echo {number}"))], TIERS[0]) for number in (12, 13))
    assert first != second


def test_hosts_with_another_libc_build_their_own(tmp_path, monkeypatch):
    """They may share a home: the library of one did not load on the other."""
    monkeypatch.setenv("BATON_CACHE", str(tmp_path))
    monkeypatch.setattr(compiler, "compiled", lambda command, flags, folder: Path(shutil.copy(__file__, folder)))
    cxx = [str(script(tmp_path / "cxx", "echo 12"))]
    paths = set()
    for number in ("2.31", "2.36"):
        monkeypatch.setattr(platform, "libc_ver", lambda number=number: ("glibc", number))
        paths.add(build.built(cxx, TIERS[0]))
    assert len(paths) == 2


def test_a_disk_without_locks_has_kernels_too(tmp_path, monkeypatch):
    """Some that are shared over a network refuse locks: everything ran on torch."""

    def refuse_lock(file, operation) -> None:
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setenv("BATON_CACHE", str(tmp_path))
    monkeypatch.setattr(compiler, "compiled", lambda command, flags, folder: Path(shutil.copy(__file__, folder)))
    monkeypatch.setattr(fcntl, "flock", refuse_lock)
    path = build.built(["g++"], TIERS[0])
    assert path.exists() and sorted(each.suffix for each in tmp_path.iterdir()) == [".lock", ".so"]


def script(path: Path, line: str) -> Path:
    path.write_text(f"#!/bin/sh\n{line}\n")
    path.chmod(0o755)
    return path


def test_a_compiler_has_its_arguments(monkeypatch):
    """`CXX="ccache g++"` was no compiler."""
    monkeypatch.setenv("CXX", f"{sys.executable} -m 'my compiler'")
    assert compiler.find() == [sys.executable, "-m", "my compiler"]
    monkeypatch.setenv("CXX", "no-such-compiler -m64")
    assert compiler.find() is None


@pytest.mark.skipif(not build.available(), reason="no tier")
@pytest.mark.parametrize("text", [" ", "g++ 'a", "''"])
def test_a_cxx_that_is_no_command_is_no_compiler(text, tmp_path, monkeypatch):
    """It ended the worker with a traceback, also where the wheel has the library and nothing is compiled."""
    monkeypatch.setenv("CXX", text)
    monkeypatch.setattr(build, "SHIPPED", tmp_path)
    assert build._load.__wrapped__() == (None, f"no C++ compiler ({text}) on this machine")
    (tmp_path / f"{build.available()[-1].name}.so").touch()
    monkeypatch.setattr(build, "NativeLibrary", lambda path, tier: path.parent)
    assert build._load.__wrapped__() == (tmp_path, "")


def test_who_waits_for_a_build_says_so_and_waits_for_no_other(tmp_path, monkeypatch):
    """Seen: a start waited ten minutes in silence for a build of other sources, whose process stood still. And this
    test, for ever: what is said while pytest's captures are read is lost, and `threads` waited for the one that `lock`
    kept waiting."""
    said = io.StringIO()
    monkeypatch.setattr(sys, "stderr", said)
    monkeypatch.setenv("BATON_CACHE", str(tmp_path))
    monkeypatch.setattr(compiler, "compiled", lambda command, flags, folder: Path(shutil.copy(__file__, folder)))
    path = build.built(["g++"], TIERS[0])
    path.unlink()
    with ThreadPoolExecutor(2) as threads, open(path.with_suffix(".lock")) as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        assert threads.submit(build.built, ["g++"], TIERS[1]).result(patience(10)).exists()
        waiting = threads.submit(build.built, ["g++"], TIERS[0])
        waits = f"waiting for another process, which builds the native kernels for {TIERS[0].name}"
        while waits not in said.getvalue():
            assert not waiting.done()
            time.sleep(0.01)
        fcntl.flock(lock, fcntl.LOCK_UN)
        assert waiting.result(patience(10)) == path


@pytest.mark.skipif(len(OWN) < 2, reason=f"this processor has {len(OWN)} of the tiers")
@pytest.mark.parametrize("name", [name for name in FORMS if name.startswith("int")])
def test_integers_have_the_same_bits_at_every_tier(name, monkeypatch):
    """Their sums are exact, and fp32 takes the groups in one order."""
    torch.manual_seed(0)
    weight, bias, x = FORMS[name]((200, 480)), torch.randn(200), torch.randn(15, 480)
    kernel = PackedLinear(weight, bias, torch.float32)
    expected = kernel(x)
    for tier in OWN[:-1]:
        library = native.NativeLibrary(build.built(compiler.find(), tier), tier)
        monkeypatch.setattr(kernel, "_apply", library.function("baton_linear", *ARGUMENTS))
        assert torch.equal(kernel(x), expected), tier.name
