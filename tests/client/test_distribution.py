"""The client as a distribution of its own: built, installed beside grpcio and protobuf alone, and used."""

import os
import re
import shutil
import subprocess
import sys
import venv
import zipfile
from importlib.metadata import files
from pathlib import Path

import pytest

from tests.support.process import ROOT

PROGRAM = """
import asyncio, importlib.util, sys
from baton.client import AsyncClient, Client
target = sys.argv[1]
with Client(target) as client:
    print(client.generate("a", max_tokens=3).choices[0].text)
async def ask():
    async with AsyncClient(target) as client:
        print("".join([message.text async for message in client.stream("a")]))
asyncio.run(ask())
found = [name for name in ("torch", "numpy", "google.rpc", "baton.engine", "baton.failpoints") if name in sys.modules]
found += [name for name in ("torch", "numpy", "gateway") if importlib.util.find_spec(name)]
print(found)
"""


@pytest.fixture(scope="module")
def wheel(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("client-wheel")
    for name in ("baton", "clients/python"):  # a build leaves files behind
        ignored = shutil.ignore_patterns("__pycache__", "build", "*.egg-info", "libraries")
        shutil.copytree(ROOT / name, folder / name, symlinks=False, ignore=ignored)
    argv = [sys.executable, "-m", "pip", "--quiet", "wheel", "--no-deps", "--no-build-isolation", "--wheel-dir", folder]
    subprocess.run(
        [*argv, folder / "clients" / "python"], check=True, timeout=170, env=os.environ | {"TMPDIR": str(folder)}
    )
    (wheel,) = folder.glob("baton_llm_client-*.whl")
    return wheel


@pytest.fixture(scope="module")
def python(wheel, tmp_path_factory) -> Path:
    """The interpreter of an environment that has the wheel and what it needs, linked from this one."""
    folder = tmp_path_factory.mktemp("client-venv")
    venv.create(folder, with_pip=False, symlinks=True)
    (packages,) = folder.glob("lib/python*/site-packages")
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(packages)
    for name in ("grpcio", "protobuf", "typing_extensions"):  # the last is grpcio's
        for file in files(name) or ():
            top = Path(*file.parts[: 2 if file.parts[0] == "google" else 1])
            source = Path(file.locate()).parents[len(file.parts) - len(top.parts) - 1] if file != top else file.locate()
            link = packages / top
            if ".." not in file.parts and not link.exists():
                link.parent.mkdir(exist_ok=True)
                link.symlink_to(source)
    return folder / "bin" / "python"


def test_what_it_needs(wheel):
    with zipfile.ZipFile(wheel) as archive:
        names = archive.namelist()
        (metadata,) = (archive.read(name).decode() for name in names if name.endswith("METADATA"))
    needed = [line for line in metadata.splitlines() if line.startswith("Requires-Dist:")]
    assert sorted(re.split(r"[^\w-]", line.split()[1])[0] for line in needed) == ["grpcio", "protobuf"]
    folders = {name.rpartition("/")[0].partition(".dist-info")[0] for name in names}
    assert {folder for folder in folders if folder.startswith("baton/")} == {"baton/client", "baton/v1"}
    assert {name for name in names if name.count("/") == 1 and name.startswith("baton/")} == {
        "baton/__init__.py",
        "baton/py.typed",
    }


def test_the_client_works_without_anything_else(python, gateways):
    (gateway,) = gateways(1)
    argv = [python, "-I", "-c", PROGRAM, gateway.target]
    done = subprocess.run(argv, capture_output=True, text=True, timeout=90)
    assert done.returncode == 0, done.stderr
    whole, streamed, others = done.stdout.splitlines()
    assert whole == streamed and whole.startswith("0.0 0.1") and others == "[]"
