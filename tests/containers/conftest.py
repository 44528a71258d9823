"""One engine and one set of images for all tests here, and the record of what was measured."""

import json
import time

import pytest

from tests.containers import images
from tests.containers.engine import Engine, install, refusal


@pytest.fixture(scope="session")
def engine():
    if why := refusal():
        pytest.fail(f"make test-compose {why}")
    install()
    with Engine() as engine:
        yield engine


@pytest.fixture(scope="session")
def record(engine):
    """A dictionary that is written beside the images when the tests have ended."""
    found: dict[str, object] = {
        "date": time.strftime("%Y-%m-%d"),
        "engine": engine.docker("version", "--format", "{{.Server.Version}}").strip(),
    }
    yield found
    (engine.folder / "record.json").write_text(json.dumps(found, indent=1) + "\n")


@pytest.fixture(scope="session")
def cpu_image(engine, record) -> str:
    images.make_base(engine)
    begun = time.monotonic()
    images.build(engine, images.make_context(engine, "cpu"), "cpu", "baton:cpu")
    record["build_s"] = round(time.monotonic() - begun)
    return "baton:cpu"
