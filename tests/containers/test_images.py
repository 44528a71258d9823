"""The images as they are built: their size, what is in them, and that a second build makes the same files."""

import json
import shutil

import pytest

from tests.containers import images
from tests.containers.images import ROOT

pytestmark = [pytest.mark.containers, pytest.mark.timeout(3000)]
GB = 1e9


def layers(engine, image: str) -> list[dict]:
    """Return what each layer adds, the newest first."""
    lines = engine.docker("history", "--no-trunc", "--human=false", "--format", "{{.Size}}\t{{.CreatedBy}}", image)
    return [
        {"bytes": int(size), "by": by[:80]}
        for size, _, by in (line.partition("\t") for line in lines.splitlines())
        if int(size)
    ]


def bill(engine, image: str) -> dict:
    program = (ROOT / "deploy" / "sbom.py").read_text()
    argv = ("run", "--rm", "--interactive", "--network", "none", "--read-only", image, "python", "-")
    return json.loads(engine.docker(*argv, input=program))


def test_the_cpu_image_is_at_most_one_and_a_half_gigabytes(engine, cpu_image, record):
    size = engine.inspect(cpu_image)["Size"]
    record["cpu"] = {"bytes": size, "layers": layers(engine, cpu_image)}
    assert size <= 1.5 * GB


def test_the_cpu_image_has_no_cuda_and_no_compiler(engine, cpu_image, record):
    found = bill(engine, cpu_image)
    (engine.folder / "sbom-cpu.json").write_text(json.dumps(found, indent=1))
    purls = [each["purl"] for each in found["components"]]
    record["cpu"]["debian_packages"] = sum(purl.startswith("pkg:deb/") for purl in purls)
    record["cpu"]["python_distributions"] = sum(purl.startswith("pkg:pypi/") for purl in purls)
    named = {purl.partition("@")[0] for purl in purls}
    assert {"pkg:pypi/torch", "pkg:pypi/baton-llm", "pkg:deb/debian/libc6"} <= named
    assert not [name for name in named if "nvidia" in name or name in ("pkg:pypi/triton", "pkg:deb/debian/g%2B%2B")]


def test_native_kernels_run_without_a_compiler(engine, cpu_image):
    """And nothing is written: the root is read-only, and the user is not root."""
    argv = ("run", "--rm", "--read-only", "--network", "none", "--cap-drop", "ALL", cpu_image)
    told = engine.docker(*argv, "python", "-m", "baton.engine.native")
    assert told.startswith("native kernels: /opt/baton/") and "/libraries/" in told
    assert engine.docker(*argv, "id", "-u").strip() == "10001"


def test_a_second_build_makes_the_same_files(engine, cpu_image, record):
    """From another copy of what the first was built from, nothing taken from a cache: every path, mode, owner and
    byte."""
    shutil.rmtree(context := engine.folder / "context-2", ignore_errors=True)
    shutil.copytree(engine.folder / "context", context)
    images.build(engine, context, "cpu", "baton-test/again", "--no-cache")
    first, second = images.files_of(engine, cpu_image), images.files_of(engine, "baton-test/again")
    unlike = sorted(name for name in first.keys() | second.keys() if first.get(name) != second.get(name))
    record["rebuilt"] = {"files": len(first), "unlike": len(unlike)}
    engine.docker("rmi", "baton-test/again")
    assert not unlike, unlike[:20]
