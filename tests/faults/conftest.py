"""Worlds that the cases of this folder share, and the row that each case leaves for the table at the end of the run."""

import json
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from tests.support.faults.reference import Reference
from tests.support.faults.world import World
from tests.support.models import make_model

_running: list[World] = []


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item, call):
    """A failure shows what the processes said last."""
    report = yield
    if report.failed:
        tails = [process.tail() for world in _running for process in world.stack.past[-4:] + world.stack.processes]
        report.sections.append(("processes", "\n".join(tails)))
    return report


@pytest.fixture(scope="session")
def model(tmp_path_factory):
    """A small random Llama, context 1,024, in bf16."""
    return make_model(tmp_path_factory.mktemp("model") / "tiny")


@pytest.fixture(scope="session")
def reference(model):
    return Reference(model)


@pytest.fixture(scope="session")
def make_world(model, reference, fork_server, tmp_path_factory):
    """`with make_world(name, **options of the stack) as world`."""

    @contextmanager
    def make(name: str, **options) -> Iterator[World]:
        options = {"fork_server": fork_server, **options}
        with World(model, tmp_path_factory.mktemp(name) / "stack", reference, **options) as world:
            _running.append(world)
            yield world
            _running.remove(world)

    return make


@pytest.fixture(scope="package")
def world(make_world):
    """Two prefill workers, two decode workers, one gateway, a Redis; KV through shared memory."""
    with make_world("world", redis=True) as world:
        yield world


@pytest.fixture(scope="package")
def tcp_world(make_world):
    """The same with KV over TCP, and prompts that are read in several chunks."""
    options = ("--num-blocks", "96", "--threads", "1", "--lease-ttl-s", "2", "--transports", "tcp")
    with make_world("tcp", options=(*options, "--max-num-batched-tokens", "128")) as world:
        yield world


@pytest.fixture
def case(request, world):
    """`async with case(name, promise) as c` on the shared world; `case(..., world=other)` on another."""
    made = []

    def begin(name: str, promise: str, allowed=("OK",), world=world):
        context = world.case(name, promise, allowed)

        class Tracked:
            async def __aenter__(self):
                made.append(await context.__aenter__())
                return made[-1]

            async def __aexit__(self, *exc):
                return await context.__aexit__(*exc)

        return Tracked()

    yield begin
    for each in made:
        request.node.user_properties.append(("fault case", json.dumps(each.row())))
