"""GPUs are dealt out to the workers of `baton up`: those that they compute on, and no others."""

import pytest

from baton.cli.launch.placing import gpus as dealt
from baton.cli.launch.placing import local
from baton.cli.launch.placing.gpus import VISIBLE, GpuSlots, deal_gpus, visible_gpus
from baton.cli.launch.placing.launcher import LaunchError, WorkerProgram
from baton.cli.launch.placing.ports import PortError
from baton.engine.core.config import EngineConfig
from baton.engine.core.device import UTILIZATION, memory_share
from baton.protocol import ROLES
from kvtransfer.memory.cuda_runtime import CudaRuntime
from tests.support.kvtransfer.cuda_stand_in import Cudart, Host

NEW, OLD = (9, 0), (7, 5)


def show(monkeypatch, named: str | None, *capabilities: tuple[int, int]) -> None:
    """Have CUDA show this process GPUs of these `capabilities`, the variable being `named`; without any there is no
    driver."""
    monkeypatch.delenv(VISIBLE, raising=False)
    if named is not None:
        monkeypatch.setenv(VISIBLE, named)
    host = Host(pci_ids=tuple(f"0000:0{number}:00.0" for number in range(len(capabilities))), capabilities=capabilities)
    monkeypatch.setattr(dealt, "find_runtime", lambda: CudaRuntime(Cudart(host)) if capabilities else None)


@pytest.mark.parametrize(
    ("named", "capabilities", "found"),
    [
        ("0,1", (NEW, NEW), ["0", "1"]),
        ("3, 1,-1,2", (NEW, NEW), ["3", "1"]),
        ("GPU-5ebe,GPU-77aa", (NEW, NEW), ["GPU-5ebe", "GPU-77aa"]),
        (None, (NEW, NEW, NEW), ["0", "1", "2"]),  # under WSL2 too, where there is no /dev/nvidia0
        ("0,7", (NEW,), ["0"]),  # CUDA reads no further than to what it does not know
        ("MIG-7,MIG-9", (NEW,), ["MIG-7", "MIG-9"]),  # it shows one part of a divided GPU alone
        (None, (NEW, OLD), ["0"]),
        ("4,2,0", (OLD, NEW, NEW), ["2", "0"]),
        (None, (OLD,), []),
        ("0", (), []),  # a driver that is too old, a torch for CPUs
        (None, (), []),
    ],
)
def test_gpus_that_workers_compute_on_are_there(monkeypatch, named, capabilities, found):
    show(monkeypatch, named, *capabilities)
    assert visible_gpus() == found


def test_each_worker_has_its_own_first():
    assert [(share.visible, share.num_workers) for share in deal_gpus(["0", "1", "2"], 2)] == [
        (("0", "1", "2"), 1),
        (("1", "2", "0"), 1),
    ]


def test_workers_beyond_the_gpus_share():
    shares = deal_gpus(["0", "1"], 3)
    assert [(share.visible[0], share.num_workers) for share in shares] == [("0", 2), ("1", 1), ("0", 2)]
    assert deal_gpus([], 3) == []


def test_a_worker_of_several_gpus_has_them_alone():
    slots = GpuSlots(["0", "1", "2", "3"], 3)
    two, one = slots.take(2), slots.take()
    assert two[:2] == (("0", "1", "2", "3"), 1) and one[:2] == (("2", "3", "0", "1"), 1)
    with pytest.raises(IndexError):
        slots.take(2)
    slots.give_back(two)
    assert slots.take(3).visible == ("3", "0", "1", "2")


def test_a_worker_never_has_one_gpu_twice():
    slots = GpuSlots(["0", "1"], 4)
    assert [slots.take(2)[:2] for _ in range(2)] == [(("0", "1"), 2)] * 2
    with pytest.raises(IndexError):
        GpuSlots(["0", "1"], 4).take(3)


def test_workers_of_one_gpu_divide_its_memory(tmp_path):
    shares = [memory_share(EngineConfig(model=tmp_path, workers_per_gpu=count)) for count in (1, 2)]
    assert shares == [UTILIZATION, UTILIZATION / 2]
    assert memory_share(EngineConfig(model=tmp_path, workers_per_gpu=2, gpu_memory_utilization=0.3)) == 0.3


async def programs(monkeypatch, tmp_path, gpus: str, *cpu_roles: str) -> list[tuple[list[str], dict[str, str]]]:
    """Arguments and variables of a prefill and a decode worker, as a stack would start them."""
    started = []
    show(monkeypatch, gpus, *(NEW for name in gpus.split(",") if name))
    monkeypatch.setattr(local, "Keeper", lambda name, argv, env, on_change: started.append((argv, env)))
    launcher = local.LocalLauncher([WorkerProgram(tmp_path, {})], (), dict.fromkeys(ROLES, 1), cpu_roles)
    for role in ROLES:
        await launcher.start(role, 1)
    launcher._ports.release_all()
    return started


async def test_two_workers_on_one_gpu(monkeypatch, tmp_path):
    for argv, env in await programs(monkeypatch, tmp_path, "0"):
        assert env == {VISIBLE: "0"} and argv[-2:] == ["--workers-per-gpu", "2"]


async def test_two_workers_on_two_gpus(monkeypatch, tmp_path):
    found = await programs(monkeypatch, tmp_path, "0,1")
    assert [env[VISIBLE] for _, env in found] == ["0,1", "1,0"]
    assert not any("--workers-per-gpu" in argv for argv, _ in found)


async def test_a_role_on_the_cpu_takes_none(monkeypatch, tmp_path):
    found = await programs(monkeypatch, tmp_path, "0", "prefill")
    assert [env for _, env in found] == [{}, {VISIBLE: "0"}]
    assert not any("--workers-per-gpu" in argv for argv, _ in found)


async def test_workers_on_cpus_are_told_how_many_divide_the_memory(monkeypatch, tmp_path):
    """Those of the first start, and one that is started later with all that are there by then; none on a GPU is."""
    started = []
    show(monkeypatch, "", OLD)
    monkeypatch.setattr(local, "Keeper", lambda name, argv, env, on_change: started.append(argv))
    launcher = local.LocalLauncher([WorkerProgram(tmp_path, {})], (), {"prefill": 1, "decode": 2}, ())
    await launcher.start("prefill", 1)
    await launcher.start("decode", 3)
    launcher._ports.release_all()
    told = [argv[argv.index("--workers-per-host") + 1] for argv in started]
    assert told == ["3", "3", "3", "4"]
    assert not any("--workers-per-host" in argv for argv, _ in await programs(monkeypatch, tmp_path, "0"))


async def test_a_variable_says_how_many_share_over_what_is_counted(monkeypatch, tmp_path):
    monkeypatch.setenv("BATON_WORKERS_PER_HOST", "6")
    monkeypatch.setenv("BATON_WORKERS_PER_GPU", "3")
    found = await programs(monkeypatch, tmp_path, "0", "prefill") + await programs(monkeypatch, tmp_path, "0")
    assert not any("--workers-per" in flag for argv, _ in found for flag in argv)


async def test_workers_on_cpus_are_not_told_of_those_on_gpus(monkeypatch, tmp_path):
    started = []
    show(monkeypatch, "0,1,2", NEW, NEW, NEW)
    monkeypatch.setattr(local, "Keeper", lambda name, argv, env, on_change: started.append(argv))
    launcher = local.LocalLauncher([WorkerProgram(tmp_path, {})], (), {"prefill": 3, "decode": 2}, ("decode",))
    await launcher.start("prefill", 3)
    await launcher.start("decode", 2)
    launcher._ports.release_all()
    assert [argv[-2:] for argv in started[3:]] == [["--workers-per-host", "2"]] * 2


async def test_workers_on_the_cpu_of_a_machine_with_an_old_gpu_are_not_bounded_by_it(monkeypatch, tmp_path):
    show(monkeypatch, None, OLD)
    monkeypatch.setattr(local, "Keeper", lambda name, argv, env, on_change: None)
    launcher = local.LocalLauncher([WorkerProgram(tmp_path, {})], (), {"decode": 2}, ())
    await launcher.start("decode", 3)
    assert launcher.gpus.num_used == 0
    launcher._ports.release_all()


async def test_a_worker_without_a_port_leaves_its_gpu(monkeypatch, tmp_path):
    """Where no port is free; the next worker has both."""

    def refuse(address: str) -> str:
        raise PortError("no port is free")

    show(monkeypatch, "0", NEW)
    monkeypatch.setattr(local, "Keeper", lambda name, argv, env, on_change: None)
    launcher = local.LocalLauncher([WorkerProgram(tmp_path, {})], (), {"decode": 1}, ())
    with monkeypatch.context() as without, pytest.raises(PortError):
        without.setattr(launcher._ports, "hold", refuse)
        await launcher.start("decode", 1)
    await launcher.start("decode", 1)
    with pytest.raises(LaunchError, match="all 1 GPUs"):
        await launcher.start("decode", 1)
    assert len(launcher._ports._held) == 1
    launcher._ports.release_all()


async def test_without_a_gpu_nothing_is_said(monkeypatch, tmp_path):
    assert all(env == {} for _, env in await programs(monkeypatch, tmp_path, ""))
