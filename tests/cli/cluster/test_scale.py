"""`baton scale`: for how long it waits, and for what."""

import asyncio
import os
import subprocess
import sys

import pytest

from baton.cli.cluster import scale, up
from baton.cli.launch import choice, stacks
from baton.cli.launch.control import DEFAULT_ADDRESS
from baton.cli.launch.placing.launcher import LaunchError, PlacedWorker, WorkerBoard
from baton.cli.launch.placing.log import flush
from baton.cli.launch.stacks import StackNote, noted_stacks
from baton.cli.main import main
from baton.system import is_byte_locked
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
async def test_a_stack_beside_another_says_how_it_is_scaled(control, capfd):

    class Started:
        async def start(self):
            return {"grpc": "127.0.0.1:1", "admin": "127.0.0.1:2", "control": control}

    assert await up._announce(Started(), None)
    assert flush(patience(10))
    told = capfd.readouterr().err
    assert ("scale this stack with --launcher 127.0.0.1:40001" in told) == (control != DEFAULT_ADDRESS)


@pytest.fixture
def noted(tmp_path, monkeypatch):
    """Stacks of this test alone."""
    monkeypatch.setattr(stacks, "default_parent", lambda: tmp_path)
    return tmp_path


@pytest.mark.parametrize("wanted", [[], ["decode=2"]])
def test_of_several_stacks_none_is_scaled_until_one_is_named(wanted, noted, capsys, monkeypatch):
    asked = []
    monkeypatch.setattr(choice, "RemoteLauncher", lambda target, access: asked.append(target) or _Full())
    notes = []
    for address in ("127.0.0.1:50050", "127.0.0.1:40001"):
        assert main(["scale", *wanted]) == 0, "there is one at most"
        notes.append(StackNote(address))
    assert asked == [DEFAULT_ADDRESS, "127.0.0.1:50050"]
    assert main(["scale", *wanted]) == 2
    assert "say which with --launcher 127.0.0.1:50050 or 127.0.0.1:40001" in capsys.readouterr().err
    assert main(["scale", *wanted, "--launcher", "127.0.0.1:40001"]) == 0
    notes.pop(0).close()
    assert main(["scale", *wanted]) == 0 and asked[2:] == ["127.0.0.1:40001"] * 2


def test_a_stack_that_was_killed_is_noted_no_more(noted):
    program = "import sys; from baton.cli.launch.stacks import StackNote; note = StackNote('127.0.0.1:1'); print(flush=True); sys.stdin.read()"
    with subprocess.Popen(
        [sys.executable, "-c", program],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        env={**os.environ, "TMPDIR": str(noted)},
    ) as process:
        process.stdout.readline()
        assert noted_stacks() == ["127.0.0.1:1"]
        process.kill()
    assert noted_stacks() == []


def test_those_who_look_are_no_stacks(noted):
    """Two that look at once: each had taken what the other looked at for a stack that has ended."""
    StackNote("127.0.0.1:1").close()
    looking = os.open(next(noted.iterdir()), os.O_RDWR)
    assert noted_stacks() == []
    os.pwrite(looking, b"127.0.0.1:2", 0)  # of one that was killed
    assert not is_byte_locked(looking, 0) and noted_stacks() == []
    os.close(looking)


def test_where_stacks_cannot_be_seen_one_has_to_be_named(noted, capsys):
    (noted / f"baton-stacks-{os.getuid()}").mkdir()
    assert main(["scale"]) == 2
    assert "say which with --launcher" in capsys.readouterr().err


def test_a_stack_that_finds_no_room_is_not_noted(noted):
    notes = [StackNote(f"127.0.0.1:{port}") for port in range(64)]
    for address in ("127.0.0.1:65", f"{'a' * 253}:1"):
        with pytest.raises(OSError, match="there are 64"):
            StackNote(address)
    for note in notes:
        note.close()
    assert noted_stacks() == []


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
