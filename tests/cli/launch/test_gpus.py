"""GPUs are dealt out to the workers of `baton up`, without asking a driver."""

import pytest

from baton.cli.launch import stack as stacks
from baton.cli.launch.gpus import VISIBLE, deal_gpus, visible_gpus
from baton.cli.launch.stack import Stack, StackPlan
from baton.engine.core.config import EngineConfig
from baton.engine.core.device import UTILIZATION, memory_share


@pytest.mark.parametrize(
    ("named", "found"),
    [("0,1", ["0", "1"]), ("", []), ("-1", []), ("3, 1,-1,2", ["3", "1"]), ("GPU-5ebe,MIG-7", ["GPU-5ebe", "MIG-7"])],
)
def test_what_the_variable_names_is_there(monkeypatch, named, found):
    monkeypatch.setenv(VISIBLE, named)
    assert visible_gpus() == found


def test_without_the_variable_each_device_file_is_one(monkeypatch, tmp_path):
    monkeypatch.delenv(VISIBLE, raising=False)
    for name in ("nvidia0", "nvidia1", "nvidiactl", "nvidia-uvm", "null"):
        (tmp_path / name).touch()
    assert visible_gpus(tmp_path) == ["0", "1"]
    assert visible_gpus(tmp_path / "none") == []


def test_each_worker_has_its_own_first():
    assert [(share.visible, share.num_workers) for share in deal_gpus(["0", "1", "2"], 2)] == [
        (("0", "1", "2"), 1),
        (("1", "2", "0"), 1),
    ]


def test_workers_beyond_the_gpus_share():
    shares = deal_gpus(["0", "1"], 3)
    assert [(share.visible[0], share.num_workers) for share in shares] == [("0", 2), ("1", 1), ("0", 2)]
    assert deal_gpus([], 3) == []


def test_workers_of_one_gpu_divide_its_memory(tmp_path):
    shares = [memory_share(EngineConfig(model=tmp_path, workers_per_gpu=count)) for count in (1, 2)]
    assert shares == [UTILIZATION, UTILIZATION / 2]
    assert memory_share(EngineConfig(model=tmp_path, workers_per_gpu=2, gpu_memory_utilization=0.3)) == 0.3


def programs(monkeypatch, tmp_path, gpus: str, **plan) -> dict[str, tuple[list[str], dict[str, str]]]:
    """Arguments and variables of the workers that a stack would start."""
    monkeypatch.setenv(VISIBLE, gpus)
    stack = Stack(StackPlan(tmp_path, **plan))
    addresses = {role: [f"{role}:{n}" for n in range(stack._plan.num_workers[role])] for role in stacks.ROLES}
    shares = deal_gpus(visible_gpus(), sum(map(len, addresses.values())) - len(plan.get("cpu_roles", ())))
    return {name: (argv, env) for name, argv, env in stack._worker_programs(addresses, iter(shares))}


def test_two_workers_on_one_gpu(monkeypatch, tmp_path):
    for argv, env in programs(monkeypatch, tmp_path, "0").values():
        assert env == {VISIBLE: "0"} and argv[-2:] == ["--workers-per-gpu", "2"]


def test_two_workers_on_two_gpus(monkeypatch, tmp_path):
    found = programs(monkeypatch, tmp_path, "0,1")
    assert [env[VISIBLE] for _, env in found.values()] == ["0,1", "1,0"]
    assert not any("--workers-per-gpu" in argv for argv, _ in found.values())


def test_a_role_on_the_cpu_takes_none(monkeypatch, tmp_path):
    found = programs(monkeypatch, tmp_path, "0", cpu_roles=["prefill"])
    assert [env for _, env in found.values()] == [{}, {VISIBLE: "0"}]
    assert not any("--workers-per-gpu" in argv for argv, _ in found.values())


def test_without_a_gpu_nothing_is_said(monkeypatch, tmp_path):
    assert all(env == {} for _, env in programs(monkeypatch, tmp_path, "").values())
