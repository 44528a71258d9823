"""`baton scale`: for how long it waits, and for what."""

import asyncio

import pytest

from baton.cli.cluster import scale, up
from baton.cli.launch.control import DEFAULT_ADDRESS
from baton.cli.launch.placing.launcher import LaunchError, PlacedWorker, WorkerBoard
from baton.cli.main import main
from tests.support.pace import patience


class _Silent:
    """A launcher that does not answer."""

    async def list(self):
        await asyncio.Event().wait()


def test_a_launcher_that_does_not_answer():
    async def main() -> None:
        scaling = asyncio.create_task(scale._scale(_Silent(), {"decode": 2}, 0.1))
        await asyncio.wait({scaling}, timeout=patience(5))
        assert scaling.done() and isinstance(scaling.exception(), TimeoutError)

    asyncio.run(main())


@pytest.mark.parametrize("control", [DEFAULT_ADDRESS, "127.0.0.1:40001"])
async def test_a_stack_beside_another_says_how_it_is_scaled(control, capsys):
    """Its control port is another one: `baton scale` without --launcher scales the first."""

    class Started:
        async def start(self):
            return {"grpc": "127.0.0.1:1", "admin": "127.0.0.1:2", "control": control}

    assert await up._announce(Started(), None)
    told = capsys.readouterr().err
    assert ("scale this stack with --launcher 127.0.0.1:40001: without it" in told) == (control != DEFAULT_ADDRESS)


@pytest.mark.parametrize(("options", "is_told"), [([], True), (["--launcher", "127.0.0.1:1"], False)])
def test_the_stack_that_is_scaled_is_told_where_none_is_named(options, is_told, capsys, monkeypatch):
    monkeypatch.setattr(scale, "make_launcher", lambda args, access: _Full())
    assert main(["scale", "decode=2", *options]) == 0
    assert capsys.readouterr().err.startswith(f"scaling the stack at {DEFAULT_ADDRESS}; of several") == is_told


class _Full:
    """A launcher of which each worker more fails."""

    keeps_roles = False

    def __init__(self):
        self.board = WorkerBoard()
        for _ in range(2):
            self.board.add(PlacedWorker(self.board.new_name("decode"), "decode", "serving"))

    async def start(self, role, number):
        self.board.add(PlacedWorker(self.board.new_name(role), role, "failed", reason="no memory"))

    async def drain(self, name):
        self.board.remove(name)

    async def list(self):
        return self.board.list()

    def watch(self):
        return self.board.watch()


async def test_a_worker_that_failed_before_fails_no_other_command():
    launcher = _Full()
    with pytest.raises(LaunchError, match="worker 2: no memory"):
        await scale._scale(launcher, {"decode": 3}, patience(5))
    for number in (2, 1):
        table = await scale._scale(launcher, {"decode": number}, patience(5))
        assert table.count("serving") == number and "no memory" in table, "it is still shown"
    with pytest.raises(LaunchError, match="worker 3: no memory"):
        await scale._scale(launcher, {"decode": 2}, patience(5))


async def test_models_are_shown_where_there_are_names():
    launcher = _Full()
    assert "model" not in await scale._scale(launcher, {}, patience(5))
    launcher.board.change("decode worker 1", model="code")
    header, _, second = (await scale._scale(launcher, {}, patience(5))).splitlines()
    assert header.endswith("model") and second.endswith("code")
