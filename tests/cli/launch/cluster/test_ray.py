"""Workers on a real Ray cluster of three raylets. A node that dies is in tests/faults."""

import asyncio
import socket
import subprocess
import sys
from types import SimpleNamespace

import pytest

from baton import client
from baton.cli.launch.placing.keeper import StartError
from baton.cli.launch.placing.launcher import Resources, WorkerProgram
from baton.service.security.access import Access
from baton.service.security.tls import GATEWAY_NAME
from tests.support.launch.launchers import all_serve, check_launcher, until
from tests.support.launch.ray_cluster import RayCluster, up_on_ray
from tests.support.launch.stand_ins import make_stand_ins
from tests.support.models import make_model
from tests.support.process import ROOT
from tests.support.security.installation import API_KEY, install

pytest.importorskip("ray")


@pytest.fixture(scope="module")
def cluster(tmp_path_factory):
    made = RayCluster(tmp_path_factory.mktemp("ray"))
    yield made
    made.close()


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return make_model(tmp_path_factory.mktemp("model") / "tiny")


async def test_places_workers_on_nodes(cluster, tmp_path, monkeypatch):
    """With small programs in place of workers, for which Python finds packages of the tests first."""
    from baton.cli.launch.cluster import ray_launcher

    folder = make_stand_ins(tmp_path)
    monkeypatch.setattr(ray_launcher, "settings_env", lambda: {"PYTHONPATH": str(folder)})
    resources = {role: Resources(num_gpus=1) for role in ("prefill", "decode")}  # GPUs, of which the cluster has none
    program = WorkerProgram(folder / "m", {})
    launcher = ray_launcher.RayLauncher(program, [f"{cluster.host}:9"], cluster.address, resources, Access())
    try:
        await check_launcher(launcher)
    finally:
        assert await launcher.close()


async def test_a_port_stays_its_workers_between_two_lives(monkeypatch, tmp_path):
    from baton.cli.launch.cluster import worker_actor

    node = SimpleNamespace(get_node_id=lambda: "node")
    monkeypatch.setattr(worker_actor.ray.util, "get_node_ip_address", lambda: "127.0.0.1")
    monkeypatch.setattr(worker_actor.ray, "get_runtime_context", lambda: node)
    monkeypatch.setattr(worker_actor, "Keeper", lambda *arguments: None)  # nothing is started
    actor = worker_actor.WorkerActor()
    where = await actor.begin("decode0", "decode", WorkerProgram(tmp_path, {}), ["127.0.0.1:9"], {})
    with socket.socket() as other, pytest.raises(OSError, match="in use"):
        other.bind(("127.0.0.1", int(where.address.rpartition(":")[2])))


def test_a_stack_serves_scales_and_drains(cluster, model, tmp_path):
    """Replicas are on different nodes, and what they answer is the same before and after."""
    made = install(tmp_path / "certs", "--host", cluster.host)
    operator = made.folder / "operator"
    with up_on_ray(cluster, model, made.folder, tmp_path / "up") as (up, ready):
        argv = [sys.executable, "-m", "baton.cli", "scale", "decode=2", "--launcher", ready["control"]]
        argv += ["--tls-ca", f"{made.folder}/ca.crt", "--tls-cert", f"{operator}.crt", "--tls-key", f"{operator}.key"]
        access = made.access(key=API_KEY).for_client() | {"tls_server_name": GATEWAY_NAME}
        with client.Client(ready["grpc"], **access) as asked:
            before = asked.generate("one two three", max_tokens=24, temperature=0)
            done = subprocess.run(argv, cwd=ROOT, capture_output=True, text=True)
            assert done.returncode == 0, done.stderr + up.tail()
            rows = [line.split() for line in done.stdout.splitlines()[1:]]
            assert len(rows) == 3 and all("serving" in row for row in rows), done.stdout
            after = asked.generate("one two three", max_tokens=24, temperature=0)
            assert before.choices == after.choices and after.choices[0].text
        assert len({row[-1] for row in rows if "decode" in row}) == 2, "decode workers are on two nodes"


def test_without_a_cluster_or_a_way_to_it(cluster, model, tmp_path):
    argv = [sys.executable, "-m", "baton.cli", "up", "--model", str(model), "--launcher", "ray", "--address"]
    for address, told in (("127.0.0.1:9", "no cluster at --address 127.0.0.1:9"), (cluster.address, "give --listen")):
        done = subprocess.run([*argv, address, "--listen", "127.0.0.1:0"], cwd=ROOT, capture_output=True, text=True)
        assert done.returncode != 0 and told in done.stderr and "Traceback" not in done.stderr, done.stderr


async def test_whatever_ray_says_a_place_is_kept(cluster, tmp_path, monkeypatch):
    """An error that nobody thought of is told, and the worker is placed again."""
    from baton.cli.launch.cluster import ray_launcher

    folder, reserved = make_stand_ins(tmp_path), []
    monkeypatch.setattr(ray_launcher, "settings_env", lambda: {"PYTHONPATH": str(folder)})

    def reserve(*args, **options):
        reserved.append(args)
        if len(reserved) == 1:
            raise OSError("the head is gone")
        return placement_group(*args, **options)

    placement_group = ray_launcher.placement_group
    monkeypatch.setattr(ray_launcher, "placement_group", reserve)
    resources = {"decode": Resources()}
    launcher = ray_launcher.RayLauncher(
        WorkerProgram(folder / "m", {}), [f"{cluster.host}:9"], cluster.address, resources, Access()
    )
    try:
        await launcher.start("decode", 1)
        (lost,) = await until(launcher, lambda workers: workers[0].state == "lost")
        assert "the head is gone" in lost.reason
        await until(launcher, all_serve(1))
    finally:
        assert await launcher.close()


async def test_a_place_that_waits_for_room_keeps_no_other_waiting(monkeypatch):
    from baton.cli.launch.cluster import ray_launcher

    launcher = SimpleNamespace(placing=asyncio.Lock(), shunned=set, nodes_of=lambda role: set())
    is_alone = []

    async def reserve(place, bundle, avoided, most_s):
        is_alone.append(launcher.placing.locked())

    monkeypatch.setattr(ray_launcher._Place, "_reserve", reserve)
    place = object.__new__(ray_launcher._Place)
    place._launcher, place.role = launcher, "decode"
    with pytest.raises(ray_launcher._Lost, match="has room"):
        await place._find_room(Resources(num_gpus=1))
    assert is_alone == [True, True, False], "the last one waits for minutes"


def test_a_cluster_that_is_gone_is_not_waited_for(monkeypatch):
    """`auto` finds the address of the last one that was started here, at which Ray would try for minutes."""
    import ray

    from baton.cli.launch.cluster import ray_launcher

    monkeypatch.setenv("RAY_ADDRESS", "127.0.0.1:9")
    monkeypatch.setattr(ray, "is_initialized", lambda: False)
    monkeypatch.setattr(ray, "init", lambda *_, **__: pytest.fail("Ray was asked"))
    with pytest.raises(StartError, match="no cluster at --address auto, which is 127.0.0.1:9: .* ray start --head"):
        ray_launcher._connect("auto")
