"""The images of a run: a base from Debian's packages, ours by deploy/Dockerfile, and stand-ins for those of others."""

import hashlib
import shutil
import subprocess
import sys
import tarfile
from pathlib import Path

from tests.containers.engine import Engine
from tests.support.process import ROOT

BASE = "baton-test/python:3.11"  # in place of the one that deploy/Dockerfile names by its digest
MIRROR = "http://deb.debian.org"
SOURCES = f"""deb {MIRROR}/debian bookworm main
deb {MIRROR}/debian bookworm-updates main
deb {MIRROR}/debian-security bookworm-security main
"""
UNUSED = ("var/lib/apt/lists", "var/cache/apt", "var/log", "usr/share/doc", "usr/share/man", "usr/share/locale")
# Images that compose.yaml takes from a registry, made of Debian's packages with the entry points and folders of those.
STAND_INS = {
    "redis": ("redis-server", ""),
    "prometheus": ("prometheus wget", 'RUN install -d -o 65534 -g 65534 /prometheus\nENTRYPOINT ["prometheus"]\n'),
}


def make_base(engine: Engine) -> None:
    """debootstrap, without what no image needs; kept by the engine for later runs."""
    if engine.has(BASE):
        return
    root = engine.folder / "base"
    shutil.rmtree(root, ignore_errors=True)
    packages = "python3,python3-venv,ca-certificates"
    argv = ["debootstrap", "--variant=minbase", f"--include={packages}", "bookworm", root, f"{MIRROR}/debian"]
    subprocess.run(argv, check=True, stdout=subprocess.DEVNULL)
    for name in UNUSED:
        shutil.rmtree(root / name)
        (root / name).mkdir()
    (root / "usr" / "bin" / "python").symlink_to("python3")
    (root / "etc" / "apt" / "sources.list").write_text(SOURCES)
    archive = engine.folder / "base.tar"
    subprocess.run(["tar", "-C", root, "-cf", archive, "."], check=True)
    engine.docker("import", archive, BASE)
    archive.unlink()
    shutil.rmtree(root)


def make_stand_ins(engine: Engine) -> None:
    """Images of Debian's Redis and Prometheus."""
    for name, (packages, more) in STAND_INS.items():
        installed = f"RUN apt-get update && apt-get install --yes --no-install-recommends {packages}\n"
        engine.docker(
            "build", "--network=host", "-t", f"baton-test/{name}", "-", input=f"FROM {BASE}\n{installed}{more}"
        )


def make_context(engine: Engine, lock: str) -> Path:
    """A copy of the tree as git sees it, with the wheels of a lock, which pip of this machine fetches as it is
    configured."""
    wheels, context = engine.folder / f"wheels-{lock}", engine.folder / "context"
    wheels.mkdir(exist_ok=True)
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "download", "--quiet", "--no-deps"]
    for each in ("build", lock):
        argv = [*pip, "--require-hashes", "-r", ROOT / "deploy" / "locks" / f"{each}.txt", "--dest", wheels]
        subprocess.run(argv, check=True, stderr=subprocess.DEVNULL)
    shutil.rmtree(context, ignore_errors=True)
    listed = subprocess.run(
        ["git", "ls-files", "--cached", "--others", "--exclude-standard", "-z"],
        cwd=ROOT,
        check=True,
        capture_output=True,
    ).stdout
    for path in filter(None, listed.decode().split("\0")):
        if (ROOT / path).is_file():
            (context / path).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / path, context / path)
    for wheel in wheels.iterdir():
        (context / "deploy" / "wheels" / wheel.name).hardlink_to(wheel)
    return context


def build(engine: Engine, context: Path, target: str, tag: str, *more: str) -> None:
    """deploy/Dockerfile, with pip kept from every index: what it installs is what the lock names."""
    arguments = [f"--build-arg=PYTHON={BASE}", "--build-arg=PIP_ARGS=--no-index"]
    engine.docker(
        "build", "--network=host", "-f", context / "deploy" / "Dockerfile", "--target", target, "-t", tag,
        *arguments, *more, context,
    )  # fmt: skip


def files_of(engine: Engine, image: str) -> dict[str, str]:
    """Every file of an image: its kind, mode, owner, and the digest of its bytes or where it leads."""
    container = engine.docker("create", image, "true").strip()
    try:
        archive = engine.folder / "export.tar"
        engine.docker("export", "--output", archive, container)
        found = {}
        with tarfile.open(archive) as tar:
            for entry in tar:
                content = tar.extractfile(entry) if entry.isfile() else None
                held = hashlib.file_digest(content, "sha256").hexdigest() if content else entry.linkname
                found[entry.name] = f"{entry.type!r} {entry.mode:o} {entry.uid}:{entry.gid} {held}"
        archive.unlink()
        return found
    finally:
        engine.docker("rm", container)
