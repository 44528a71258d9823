"""Launchers of this machine with small programs in place of workers: directly, and through the control port."""

import asyncio
import os
import signal
from contextlib import asynccontextmanager

import grpc
import pytest

from baton.cli.cluster.scale import _scale
from baton.cli.launch.control import ControlServer, RemoteLauncher
from baton.cli.launch.placing import gpus
from baton.cli.launch.placing.gpus import VISIBLE
from baton.cli.launch.placing.keeper import Life
from baton.cli.launch.placing.launcher import LaunchError, PlacedWorker, WorkerBoard, WorkerProgram, scale
from baton.cli.launch.placing.local import LocalLauncher
from baton.cli.launch.placing.ports import HeldPorts, PortError
from baton.cli.launch.stack import _all_serve
from baton.service.net.server import listening_socket
from baton.service.security.access import Access
from baton.service.security.tls import Tls
from kvtransfer.memory.cuda_runtime import CudaRuntime
from tests.support.kvtransfer.cuda_stand_in import Cudart, Host
from tests.support.launch.launchers import all_serve, check_launcher, until
from tests.support.launch.stand_ins import make_stand_ins
from tests.support.pace import patience
from tests.support.security.installation import install


class Board:
    """A launcher whose workers are as a test says."""

    def __init__(self):
        self.board = WorkerBoard()

    async def list(self):
        return self.board.list()

    def watch(self):
        return self.board.watch()


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(make_stand_ins(tmp_path))
    return tmp_path


@asynccontextmanager
async def local(folder, *, num_first: int = 0):
    program = WorkerProgram(folder / "m", {"decode": ["--threads=1"]})
    launcher = LocalLauncher([program], ["127.0.0.1:1"], {"decode": num_first}, ("prefill",))
    try:
        yield launcher
    finally:
        assert await launcher.close()


@asynccontextmanager
async def remote(launcher, tls: Tls | None = None, access: Access = Access()):
    server = ControlServer(launcher, tls)
    port = await server.start("127.0.0.1:0")
    try:
        yield RemoteLauncher(f"127.0.0.1:{port}", access)
    finally:
        await server.stop()


async def test_another_server_is_no_launcher():
    """As the port of a gateway that is for its workers."""
    server = grpc.aio.server()
    target = f"127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}"
    await server.start()
    try:
        with pytest.raises(LaunchError, match=f"^{target} is no launcher: give what `baton up` calls control=$"):
            await RemoteLauncher(target, Access()).list()
    finally:
        await server.stop(0)


@pytest.mark.parametrize(
    "address", ["nowhere", ":5", "127.0.0.1:70000", "127.0.0.1:" + "1" * 5000], ids=lambda text: text[:20]
)
def test_what_is_no_address_is_not_held(address):
    with pytest.raises(PortError, match="is not HOST:PORT"):
        HeldPorts().hold(address)


def test_of_a_port_that_is_taken_it_is_said_what_to_do():
    ports, others = HeldPorts(), HeldPorts()
    address = others.hold("127.0.0.1:0")
    with listening_socket(address), pytest.raises(PortError, match="stop what listens there or choose another"):
        ports.hold(address)
    others.release_all()


def test_a_port_of_ipv6_is_held():
    ports = HeldPorts()
    assert ports.hold("[::1]:0").startswith("[::1]:")
    ports.release_all()


async def test_the_local_launcher_is_a_launcher(folder):
    async with local(folder) as launcher:
        await check_launcher(launcher)


async def test_through_the_control_port(folder):
    async with local(folder) as launcher, remote(launcher) as asked:
        await check_launcher(asked)


async def test_a_dead_worker_is_lost_and_serves_again(folder):
    async with local(folder) as launcher:
        await launcher.start("decode", 1)
        (before,) = await until(launcher, all_serve(1))
        (kept,) = launcher._kept.values()
        os.kill(int((await kept.keeper.started)["pid"]), signal.SIGKILL)
        (lost,) = await until(launcher, lambda workers: workers[0].state == "lost")
        assert "SIGKILL" in lost.reason
        assert await until(launcher, all_serve(1)) == [before], "at the same address"


async def test_a_failed_start_is_told_and_not_tried_again(folder):
    (folder / "decode_worker.fails").touch()
    async with local(folder) as launcher:
        await launcher.start("decode", 1)
        (failed,) = await until(launcher, lambda workers: workers[0].state == "failed")
        assert "truncated" in failed.reason and failed.exit_status == 1 and not failed.stays
        (folder / "decode_worker.fails").unlink()
        await launcher.start("decode", 1)
        await until(launcher, all_serve(1), "what failed is forgotten once another starts")


async def test_a_worker_that_an_operator_drains_is_replaced(folder):
    """`baton drain --stay-away`, then `baton scale decode=1`: that said done, and no worker was left."""
    async with local(folder) as launcher:
        await launcher.start("decode", 1)
        await until(launcher, all_serve(1))
        (folder / "decode_worker.drains").write_text("away")
        (leaving,) = await until(launcher, lambda workers: workers[0].state == "draining")
        scaling = asyncio.create_task(_scale(launcher, {"decode": 1}, patience(90)))
        *_, new = await until(launcher, lambda workers: [each.state for each in workers] == ["draining", "serving"])
        assert not scaling.done(), "it is not gone yet"
        (folder / "decode_worker.draining").unlink()
        assert new.name in (table := await scaling) and leaving.name not in table


async def test_a_worker_that_restarts_after_its_drain_is_waited_for(folder):
    async with local(folder) as launcher:
        await launcher.start("decode", 1)
        (before,) = await until(launcher, all_serve(1))
        (folder / "decode_worker.drains").write_text("restart")
        (lost,) = await until(launcher, lambda workers: workers[0].state == "lost")
        assert lost.reason == "drains, then starts again" and lost.stays
        scaling = asyncio.create_task(_scale(launcher, {"decode": 1}, patience(90)))
        await asyncio.sleep(0.1)
        assert not scaling.done() and len(await launcher.list()) == 1
        (folder / "decode_worker.draining").unlink()
        assert before.name in await scaling


async def test_a_worker_that_changes_its_role_counts_for_the_next_one(folder):
    async with local(folder) as launcher:
        await launcher.start("decode", 1)
        await until(launcher, all_serve(1))
        (folder / "decode_worker.drains").write_text("prefill")
        (lost,) = await until(launcher, lambda workers: workers[0].state == "lost")
        assert lost.role == "prefill"
        (folder / "decode_worker.draining").unlink()


async def test_a_drain_that_finds_the_worker_gone(folder):
    """It stays away in the same turn of the loop, before the drain has begun."""
    async with local(folder) as launcher:
        await launcher.start("decode", 1)
        (worker,) = await until(launcher, all_serve(1))
        await launcher.drain(worker.name)
        launcher._note(worker.name, Life("gone"))
        await until(launcher, lambda workers: not workers)
    assert not launcher._drains


async def test_a_drain_takes_as_long_as_the_role_may(folder):
    (folder / "decode_worker.hangs").touch()
    launcher = LocalLauncher([WorkerProgram(folder / "m", {}, {"decode": 0.5})], (), {}, ("decode",))
    await launcher.start("decode", 1)
    await until(launcher, all_serve(1))
    assert not await launcher.close(), "it was killed"


async def test_a_cancelled_close_does_not_keep_kill_from_its_end(folder):
    """It is that of a second signal."""
    (folder / "decode_worker.hangs").touch()
    async with local(folder) as launcher:
        await launcher.start("decode", 1)
        await until(launcher, all_serve(1))
        closing = asyncio.create_task(launcher.close())
        await until(launcher, lambda workers: workers[0].state == "draining")
        closing.cancel()
        await asyncio.wait([closing])
        await launcher.kill()
        assert await launcher.list() == []


async def test_a_worker_that_is_taken_away_before_it_serves_is_not_waited_for():
    launcher = Board()
    for name, state in (("a", "serving"), ("b", "starting")):
        launcher.board.add(PlacedWorker(name, "decode", state))
    ready = asyncio.create_task(_all_serve(launcher))
    await asyncio.sleep(0)
    assert not ready.done()
    launcher.board.change("b", state="draining")
    await asyncio.wait_for(ready, patience(5))


async def test_only_operators_scale(folder, tmp_path):
    made = install(tmp_path / "certs")
    async with local(folder) as launcher:
        async with remote(launcher, made.tls("gateway"), made.access("operator")) as asked:
            assert await asked.list() == []
        for role in ("decode", "gateway"):
            async with remote(launcher, made.tls("gateway"), made.access(role)) as asked:
                for call in (asked.list(), asked.start("decode", 1), asked.drain("x")):
                    with pytest.raises(LaunchError, match="PERMISSION_DENIED"):
                        await call
        assert await launcher.list() == []


async def test_what_the_control_port_refuses(folder):
    async with local(folder) as launcher, remote(launcher) as asked:
        for role, number, told in (("encode", 1, "encode"), ("decode", 0, "number"), ("decode", 5000, "4096")):
            with pytest.raises(LaunchError, match=told):
                await asked.start(role, number)
        assert await launcher.list() == []


async def test_later_workers_have_gpus_of_their_own(folder, monkeypatch):
    monkeypatch.setenv(VISIBLE, "0,1")
    monkeypatch.setattr(gpus, "find_runtime", lambda: CudaRuntime(Cudart(Host())))
    async with local(folder, num_first=1) as launcher:
        await launcher.start("decode", 2)
        await launcher.start("prefill", 1)  # on the CPU
        with pytest.raises(LaunchError, match="all 2 GPUs"):
            await launcher.start("decode", 1)
        workers = await until(launcher, all_serve(3))
        assert [kept.share and kept.share.visible for kept in launcher._kept.values()] == [("0", "1"), ("1", "0"), None]
        await launcher.drain(workers[0].name)
        await until(launcher, all_serve(2))
        await launcher.start("decode", 1)
        await until(launcher, all_serve(3), "on the GPU that was left")


async def test_each_model_keeps_a_worker_of_a_role(folder):
    """Numbers are of all models together: those that go are of the one with most workers, those that come of the one
    with fewest."""
    programs = [WorkerProgram(folder / "m", {}, model_name=name) for name in ("chat", "code")]
    launcher = LocalLauncher(programs, ["127.0.0.1:1"], {}, ("prefill",))

    async def models(number: int) -> list[str]:
        return [worker.model for worker in await until(asked, all_serve(number))]

    try:
        async with remote(launcher) as asked:
            await scale(asked, "decode", 5)
            assert await models(5) == ["chat", "code", "chat", "code", "chat"]
            await scale(asked, "decode", 2)
            assert await models(2) == ["chat", "code"]
            with pytest.raises(LaunchError, match="decode=1: 2 models are served"):
                await scale(asked, "decode", 1)
            await asked.drain((await asked.list())[0].name)
            assert await models(1) == ["code"]
            await scale(asked, "decode", 2)
            assert await models(2) == ["code", "chat"]
    finally:
        assert await launcher.close()
