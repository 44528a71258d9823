"""What the scaler decides, carried out by a launcher: of Kubernetes, whose API server is the tests'."""

import pytest

from baton.cli.launch.cluster.kubernetes import KubernetesLauncher
from baton.cli.launch.placing.launcher import LaunchError
from baton.cli.main import main
from baton.cli.planning.performer import FleetPerformer
from baton.planning.scaling import loop
from baton.planning.scaling.counters import Placed
from baton.planning.scaling.live import WorkerLoad
from baton.planning.scaling.scaler import ScaleChange
from baton.service.security.access import Access
from tests.support.launch.kubernetes import ApiServer
from tests.support.launch.launchers import all_serve, until


async def leads() -> bool:
    return True


async def test_starts_drains_and_changes_roles():
    async with ApiServer(("p", "prefill", "b"), ("d", "decode", "b")).serve() as url:
        launcher = KubernetesLauncher.find("llm", None, url)
        performer = FleetPerformer(Access(), launcher)
        await performer.start("decode", 3)
        three = await until(launcher, all_serve(3))
        assert await performer.placed() == [Placed("decode", worker.address) for worker in three]
        assert await FleetPerformer(Access()).placed() == []
        await performer.drain(three[0].address, "")
        assert len(await performer.placed()) == 2, "one that is drained is none of them"
        await performer.drain(three[1].address, "prefill")
        left = await until(
            launcher, lambda workers: all_serve(2)(workers) and len({each.role for each in workers}) == 2
        )
        assert {worker.name for worker in left if worker.role == "decode"} == {three[2].name}
        with pytest.raises(LaunchError, match="10.9.9.9:1"):
            await performer.drain("10.9.9.9:1", "")


async def test_a_worker_that_nothing_can_follow_stays():
    """Its role's Deployment is not there: no other one is asked in its place either."""
    async with ApiServer(("d", "decode", "b")).serve() as url:
        launcher = KubernetesLauncher.find("llm", None, url)
        performer = FleetPerformer(Access(), launcher)
        await performer.start("decode", 3)
        three = await until(launcher, all_serve(3))
        leaving = iter(WorkerLoad(worker.address, 0) for worker in three)
        await loop._perform(performer, ScaleChange("change", "decode", 2, "prefill"), leaving, leads)
        assert len(await performer.placed()) == 3


async def test_a_change_that_fails_asks_no_other_worker():
    asked = []

    class Deaf:
        async def drain(self, address, next_role):
            asked.append(address)
            raise TimeoutError

    leaving = [WorkerLoad(f"10.0.0.{number}:1", 0) for number in range(4)]
    await loop._perform(Deaf(), ScaleChange("change", "decode", 2, "prefill"), iter(leaving), leads)
    assert len(asked) == 2
    await loop._perform(Deaf(), ScaleChange("drain", "decode", 2), iter(leaving), leads)
    assert len(asked) == 6, "of those that may just go, the next is asked"


def test_a_launcher_needs_apply(capsys):
    assert main(["scaler", "--target", "127.0.0.1:1", "--launcher", "127.0.0.1:2"]) == 2
    assert "--launcher has no effect without --apply" in capsys.readouterr().err
    assert main(["scaler", "--target", "127.0.0.1:1", "--apply", "--launcher", "127.0.0.1:2", "--namespace", "x"]) == 2
    assert "--namespace has no effect" in capsys.readouterr().err
