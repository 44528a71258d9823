"""The keeper with small programs: ready lines, restarts with growing pauses, failed starts, drains, no orphans."""

import asyncio
import errno
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from baton import system
from baton.cli.launch.placing import keeper as keeper_module
from baton.cli.launch.placing.keeper import Keeper, StartError
from baton.cli.launch.placing.log import flush
from baton.system import GroupEvents
from tests.support.pace import patience
from tests.support.process import children
from tests.support.waiting import until_async

IMPORTS = "import os, signal, sys, time\n"
SAY_READY = "print('ready grpc=h:1 pid=%d' % os.getpid(), flush=True)\n"
READY = IMPORTS + SAY_READY
THREADS = (
    "its group's limit of threads (pids.max, TasksMax of systemd) was met since it started and may have ended it; "
    "give a larger one, or fewer workers"
)


def program(body: str) -> list[str]:
    return [sys.executable, "-c", body]


def alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


class ShownLog:
    """What keepers have written to stderr so far."""

    def __init__(self, capfd):
        self._capfd = capfd
        self.text = ""

    def read(self) -> str:
        self.text += self._capfd.readouterr().err
        return self.text


@pytest.fixture
def shown(capfd) -> ShownLog:
    return ShownLog(capfd)


async def test_ready_then_drained():
    keeper = Keeper("x", program(READY + "time.sleep(60)"))
    fields = await keeper.started
    assert fields["grpc"] == "h:1" and alive(int(fields["pid"]))
    assert await keeper.stop(10)
    assert not alive(int(fields["pid"]))


async def test_the_log_of_a_child_says_which_one_it_is(capfd):
    """Workers of one role write into one log."""
    body = (
        "import logging\nfrom baton.service import logs\nlogs.setup('decode')\nlogging.getLogger('x').warning('here')\n"
    )
    keeper = Keeper("decode worker 2", program(IMPORTS + body + SAY_READY + "time.sleep(60)"))
    await keeper.started
    assert await keeper.stop(10)
    assert flush(patience(10))
    assert " decode worker 2 WARNING here\n" in capfd.readouterr().err


async def test_killed_when_it_does_not_drain(capfd):
    deaf = "signal.signal(signal.SIGTERM, signal.SIG_IGN); print('deaf', flush=True)\n"
    keeper = Keeper("x", program(IMPORTS + deaf + SAY_READY + "time.sleep(60)"))
    fields = await keeper.started
    assert not await keeper.stop(0.2)
    assert not alive(int(fields["pid"]))
    assert flush(patience(10))
    assert "deaf" in capfd.readouterr().err


async def test_a_signal_leaves_the_childs_status_to_asyncio(monkeypatch):
    """Popen.send_signal polls: of a child that has just died asyncio would learn nothing but "Unknown child
    process"."""
    signalled = []
    monkeypatch.setattr(subprocess.Popen, "send_signal", lambda self, number: signalled.append(number))
    keeper = Keeper("x", program(READY + "time.sleep(60)"))
    fields = await keeper.started
    assert await keeper.stop(10) and not signalled and not alive(int(fields["pid"]))


async def test_restarts_with_growing_pauses(tmp_path, capfd):
    log = tmp_path / "starts"
    body = READY + f"open({str(log)!r}, 'a').write(f'{{time.monotonic()}}\\n'); sys.exit(7)"
    keeper = Keeper("worker", program(body), pause_s=0.05, max_pause_s=0.2)
    await until_async(lambda: log.exists() and len(log.read_text().split()) >= 5, "it was not started again")
    await keeper.stop(10)
    starts = [float(line) for line in log.read_text().split()]
    gaps = [after - before for before, after in zip(starts, starts[1:])]
    assert all(gap >= pause for gap, pause in zip(gaps, [0.05, 0.1, 0.2, 0.2]))
    assert flush(patience(10))
    err = capfd.readouterr().err
    assert "worker ended with status 7; it starts again in 0.05 s" in err and "again in 0.2 s" in err


async def test_a_settled_program_is_restarted_soon(shown):
    keeper = Keeper("worker", program(READY + "sys.exit(0)"), pause_s=0.01, settled_s=0.0)
    await until_async(lambda: shown.read().count("again in") >= 3, "no restarts")
    await keeper.stop(10)
    assert "0.02" not in shown.text


async def test_killed_by_name(shown):
    keeper = Keeper("worker", program(READY + "time.sleep(60)"), pause_s=0.01)
    os.kill(int((await keeper.started)["pid"]), signal.SIGKILL)
    await until_async(lambda: "was killed by SIGKILL" in shown.read(), "nothing was logged")
    await keeper.stop(10)


@pytest.mark.parametrize("apart", [True, False], ids=["in a session of its own", "in its group"])
async def test_the_end_of_a_child_is_seen_whoever_holds_its_pipes(apart):
    """As ranks do, which may hang in the driver of a GPU: the worker was neither started again nor stopped."""
    lives = []
    holder = f"held = subprocess.Popen(['sleep', '600'], start_new_session={apart})\n"
    ready = "print('ready grpc=h:1 pid=%d held=%d' % (os.getpid(), held.pid), flush=True)\n"
    body = IMPORTS + "import subprocess\n" + holder + ready + "time.sleep(600)"
    keeper = Keeper("worker", program(body), on_change=lives.append, pause_s=0.01)
    os.kill(int((await keeper.started)["pid"]), signal.SIGKILL)
    try:
        await until_async(lambda: [life.state for life in lives].count("serving") == 2, "it was not started again")
        async with asyncio.timeout(patience(20)):
            assert await keeper.stop(patience(10))
        held = [int(life.fields["held"]) for life in lives if life.state == "serving"]
        await until_async(
            lambda: [alive(pid) for pid in held] == [apart, apart], "what it had started in its group lives"
        )
    finally:
        for life in lives:
            if "held" in life.fields and alive(int(life.fields["held"])):
                os.kill(int(life.fields["held"]), signal.SIGKILL)


@pytest.mark.parametrize("status, expected", [(1, 1), (2, 2), (7, 1)])
async def test_failed_start_is_its_last_line(status, expected, capfd):
    body = f"sys.stderr.write('loading\\nx: /m/config.json is missing\\n'); sys.exit({status})"
    keeper = Keeper("x", program(IMPORTS + body))
    with pytest.raises(StartError) as raised:
        await keeper.started
    assert str(raised.value) == "x: /m/config.json is missing" and raised.value.status == expected
    await keeper.stop(1)
    assert flush(patience(10))
    assert "loading" not in capfd.readouterr().err


async def test_what_a_start_is_at_is_shown_at_once(shown):
    body = "sys.stderr.write('loading\\nstarting: x: reading /m\\n'); sys.stderr.flush(); time.sleep(60)"
    keeper = Keeper("x", program(IMPORTS + body))
    await until_async(lambda: "starting: x: reading /m" in shown.read(), "it was held back")
    assert "loading" not in shown.text
    await keeper.stop(10)


async def test_failed_start_of_a_crash_is_whole():
    keeper = Keeper("x", program("raise RuntimeError('a bug')"))
    with pytest.raises(StartError) as raised:
        await keeper.started
    assert str(raised.value).startswith("Traceback") and "a bug" in str(raised.value)


@pytest.fixture
def events(monkeypatch):
    """Returns what sets what the kernel has ended and refused so far."""
    now = [GroupEvents(3, 5)]
    monkeypatch.setattr(system, "group_events", lambda: now[-1])
    monkeypatch.setattr(system, "memory_limit", lambda: 1 << 30)
    return lambda killed, refused: now.append(GroupEvents(killed, refused))


@pytest.mark.parametrize(
    "end, killed, refused, wanted",
    [
        ("os.kill(os.getpid(), 9)", 3, 5, "x was killed by SIGKILL"),
        (
            "os.kill(os.getpid(), 9)", 4, 5,
            "x was killed by SIGKILL: memory, of which this host or container has 1.0 GiB, ran out since it started and may "
            "have ended it; give fewer workers or --num-blocks, --quantization int8, or a larger limit",
        ),
        ("os.kill(os.getpid(), 11)", 4, 5, "x was killed by SIGSEGV"),
        (
            "os.kill(os.getpid(), 11)", 3, 6,
            f"x was killed by SIGSEGV: {THREADS}",
        ),
        (
            "sys.tracebacklimit = 0; raise RuntimeError('can\\'t start new thread')", 3, 6,
            f"RuntimeError: can't start new thread\nx ended with status 1: {THREADS}",
        ),
        (
            "sys.exit('x: --listen h:1: address already in use')", 3, 6,
            f"x: --listen h:1: address already in use\nx ended with status 1: {THREADS}",
        ),
        ("sys.exit('x: no model')", 3, 5, "x: no model"),
        ("print('x: no model', file=sys.stderr); sys.exit(2)", 3, 6, "x: no model"),
    ],
)  # fmt: skip
async def test_a_limit_that_ended_a_start_is_told(events, tmp_path, end, killed, refused, wanted):
    wait = f"while not os.path.exists({str(tmp_path / 'go')!r}): time.sleep(0.01)\n"
    keeper = Keeper("x", program(IMPORTS + wait + end))
    await until_async(lambda: keeper._child is not None, "it was not started")
    events(killed, refused)
    (tmp_path / "go").touch()
    with pytest.raises(StartError) as raised:
        await keeper.started
    assert str(raised.value) == wanted


async def test_a_limit_that_ended_what_served_is_told(events):
    lives = []
    keeper = Keeper("x", program(READY + "time.sleep(60)"), on_change=lives.append)
    pid = int((await keeper.started)["pid"])
    events(4, 5)
    os.kill(pid, signal.SIGKILL)
    await until_async(lambda: any(life.state == "lost" for life in lives), "its end was not seen")
    assert "was killed by SIGKILL: memory, of which" in lives[-1].reason
    await keeper.stop(10)


async def test_what_stays_away_is_left_ended(shown):
    """It knows what keeps it, and tells the operator who drains it."""
    body = READY + "print(os.environ['BATON_KEEPER'], flush=True); sys.exit(3)"
    keeper = Keeper("decode worker 0", program(body), pause_s=0.01)
    await until_async(lambda: "decode worker 0 was drained and stays away" in shown.read(), "it was not left ended")
    assert shown.text.count("baton up\n") == 1 and "starts again" not in shown.text
    assert await keeper.stop(10)


async def test_silent_failed_start():
    keeper = Keeper("decode worker 0", program("import os; os.kill(os.getpid(), 9)"))
    with pytest.raises(StartError, match="decode worker 0 was killed by SIGKILL"):
        await keeper.started


async def test_a_slow_start_can_be_watched(shown, monkeypatch):
    monkeypatch.setattr("baton.cli.launch.placing.keeper._HOLD_S", 0.05)
    keeper = Keeper("gateway", program(IMPORTS + "print('no worker yet', file=sys.stderr); time.sleep(60)"))
    await until_async(lambda: "no worker yet" in shown.read(), "nothing was shown")
    await keeper.stop(10)


async def test_stopped_before_it_was_ready():
    keeper = Keeper("x", program("import time; time.sleep(60)"))
    await asyncio.sleep(0.05)
    assert await keeper.stop(10)
    assert keeper.started.cancelled()


async def test_what_a_child_has_started_goes_with_it():
    body = "import subprocess, sys\nchild = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(60)'])\n"
    body += "import os, time; print(f'ready child={child.pid}', flush=True); time.sleep(60)"
    keeper = Keeper("x", program(body))
    child = int((await keeper.started)["child"])
    await keeper.stop(0.2)  # the child has its stdout, so that it does not seem to go
    await until_async(lambda: not alive(child), "its child lives")


def test_a_child_does_not_outlive_its_keeper():
    ours = f"""
import asyncio, sys
from baton.cli.launch.placing.keeper import Keeper
async def main():
    keeper = Keeper("x", [sys.executable, "-c", {READY + "time.sleep(60)"!r}])
    print((await keeper.started)["pid"], flush=True)
    await asyncio.sleep(60)
asyncio.run(main())
"""
    parent = subprocess.Popen([sys.executable, "-c", ours], stdout=subprocess.PIPE, text=True)
    pid = int(parent.stdout.readline())
    assert alive(pid)
    parent.kill()
    parent.wait()
    parent.stdout.close()
    deadline = time.monotonic() + patience(10)
    while alive(pid):
        assert time.monotonic() < deadline, "it outlived its parent"
        time.sleep(0.01)


async def test_a_start_that_the_system_refuses_is_tried_again(capfd, monkeypatch):
    spawn, refused = keeper_module._Child.spawn, []

    async def refuse(*spawned):
        if len(refused) < 3 and keeper.started.done():
            refused.append(spawned)
            raise BlockingIOError(errno.EAGAIN, "Resource temporarily unavailable")
        return await spawn(*spawned)

    monkeypatch.setattr(keeper_module._Child, "spawn", refuse)
    keeper = Keeper("worker", program(READY + "time.sleep(60)"), pause_s=0.01)
    first = await keeper.started
    os.kill(int(first["pid"]), signal.SIGKILL)
    await until_async(lambda: len(refused) == 3 and keeper._child.status is None, "it was not started again")
    assert await keeper.stop(10)
    assert flush(patience(10))
    assert "worker could not be started: Resource temporarily unavailable; it starts again" in capfd.readouterr().err


async def test_a_start_for_which_no_thread_is_left_is_one_line(monkeypatch):
    """A thread waits for each child where the kernel has no pidfd."""

    async def refuse(*spawned):
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(keeper_module._Child, "spawn", refuse)
    keeper = Keeper("worker", program(READY))
    async with asyncio.timeout(patience(10)):
        with pytest.raises(StartError, match="^worker could not be started: can't start new thread$"):
            await keeper.started
    assert await keeper.stop(10)


async def test_a_child_that_cannot_be_waited_for_does_not_run_beside_the_next(monkeypatch):
    """asyncio takes the thread (before Python 3.12) or the descriptor by which it waits for a child after the fork."""
    start, pidfd_open, before, refused, lives = threading.Thread.start, os.pidfd_open, {*children(os.getpid())}, [], []

    def refuse(error: Exception) -> None:
        if len(lives) == 3 and not refused:  # starting, serving, lost
            refused.extend({*children(os.getpid())} - before)
            raise error

    def start_thread(thread):
        if "waitpid" in thread.name:
            refuse(RuntimeError("can't start new thread"))
        start(thread)

    def open_pidfd(pid, flags=0):
        refuse(OSError(errno.EMFILE, "Too many open files"))
        return pidfd_open(pid, flags)

    monkeypatch.setattr(threading.Thread, "start", start_thread)
    monkeypatch.setattr(os, "pidfd_open", open_pidfd)
    keeper = Keeper("worker", program(READY + "time.sleep(60)"), on_change=lives.append, pause_s=0.01)
    os.kill(int((await keeper.started)["pid"]), signal.SIGKILL)
    await until_async(lambda: lives[-1].state == "serving" and len(lives) > 3, "it was not started again")
    assert [life.state for life in lives] == ["starting", "serving", "lost", "lost", "starting", "serving"]
    assert "could not be started" in lives[3].reason and len(refused) == 1
    assert {*children(os.getpid())} - before == {int(lives[-1].fields["pid"])}
    assert await keeper.stop(10)


async def test_an_interpreter_that_may_not_be_run_is_named(monkeypatch):
    monkeypatch.setattr(keeper_module.sys, "executable", "/dev/null")
    keeper = Keeper("worker", ["/nowhere/program"])
    with pytest.raises(StartError, match="^worker could not be started: /dev/null: Permission denied$"):
        await keeper.started
    assert await keeper.stop(10)


async def test_a_program_that_is_not_there_is_one_line():
    keeper = Keeper("worker", ["/nowhere/program"])
    with pytest.raises(StartError, match="^/nowhere/program: No such file or directory$"):
        await keeper.started
    assert await keeper.stop(10)


async def test_a_child_goes_on_where_nobody_reads_what_it_says(monkeypatch):
    reading, writing = os.pipe()
    os.close(reading)
    with open(writing, "w") as gone:
        monkeypatch.setattr(keeper_module.sys, "stderr", gone)
        keeper = Keeper(
            "worker", program(READY + "for _ in range(100_000): print('x' * 20, file=sys.stderr)\n" + SAY_READY)
        )
        await keeper.started
        await until_async(lambda: keeper._child.status is not None, "the child hangs")
        await keeper.stop(10)
        assert flush(patience(10))
