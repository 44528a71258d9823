"""The steps of `baton doctor --gpu` on stand-ins: what each calls right, and what it finds wrong."""

import argparse
import json
import os
import sys
import weakref
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")  # read when triton is first imported
pytest.importorskip("triton")

from baton.cli.cluster import up
from baton.cli.gpu.random_engine import RandomEngine
from baton.cli.gpu.steps import copies, engine, faults, graphs, groups, host, kernels, workers
from baton.cli.gpu.steps import model as model_step
from baton.cli.launch.stack import SHIPPED_MODEL
from baton.engine import kernels as triton_kernels
from baton.engine.core.device import GIB
from kvtransfer.memory.cuda_runtime import CudaRuntime
from kvtransfer.memory.device_memory import DeviceRegion
from tests.support.kvtransfer.cuda_stand_in import Cudart, Host
from tests.support.models import make_model

CPU = torch.device("cpu")
TINY = (2, 64, 128, 4, 2, 16, 300)


class Table(dict):
    """What a step says: (verdict, text) by what was checked."""

    def __call__(self, what, is_right, text) -> None:
        assert what not in self and "\n" not in text
        self[what] = is_right, text

    @property
    def wrong(self) -> list[str]:
        return [what for what, (is_right, _) in self.items() if is_right is False]


# ---- host ----


class Machine(host.Probe):
    """One H100 with everything that is needed, but for what a test takes away."""

    gpu = "0, NVIDIA H100 80GB HBM3, 580.65.06, 9.0, 81559, 80000, Disabled, 0, Not Active, 00000000:01:00.0"

    def __init__(self, folder: Path, **changed):
        self._folder, self._changed = folder, changed

    def smi(self, *arguments):
        rows = self.gpu.splitlines() if "--query-gpu" in arguments[0] else ["4711, 900, python"]
        return [[cell.strip() for cell in row.split(",")] for row in rows]

    def bus_ids(self):
        return self._changed.get("bus_ids", ["0000:01:00.0"])

    def driver_refusal(self):
        return self._changed.get("driver", "")

    def has_module(self, name):
        return self._changed.get("triton", True)

    def program(self, name):
        return self._changed.get("compiler", "/usr/bin/gcc")

    def header(self):
        return self._folder / self._changed.get("header", "")

    def libcuda(self):
        return self._changed.get("libcuda", "libcuda.so.1")

    def cache(self):
        return self._folder

    def shm_bytes(self):
        return self._changed.get("shm", 1 << 30)

    def numa_node(self, bus_id):
        return 1


def on_host(machine: Machine) -> Table:
    table = Table()
    host.check(table, None, machine)
    return table


def test_a_host_that_is_ready(tmp_path):
    table = on_host(Machine(tmp_path))
    assert not table.wrong and table["GPU 0: MIG"] == (True, "off")
    assert "capability 9.0, driver 580.65.06, NUMA node 1" in table["GPU 0"][1]
    assert table["holds memory"] == (None, "process 4711, python: 900 MiB")


@pytest.mark.parametrize(
    "changed, what",
    [
        (dict(driver="the NVIDIA driver serves CUDA up to 12.2"), "driver and torch"),
        (dict(triton=False), "triton"),
        (dict(compiler=None), "C compiler"),
        (dict(header="missing"), "Python.h"),
        (dict(libcuda=None), "libcuda"),
        (dict(shm=1 << 20), "/dev/shm"),
        (
            dict(shm=64 << 20, bus_ids=["0000:01:00.0", "0000:02:00.0"]),
            "/dev/shm",
        ),  # as containers have it by themselves
    ],
)
def test_a_host_that_lacks_something(tmp_path, changed, what):
    assert on_host(Machine(tmp_path, **changed)).wrong == [what]


@pytest.mark.parametrize(
    "was, becomes, what",
    [
        ("9.0", "7.5", "GPU 0"),
        ("80000", "9000", "GPU 0: memory"),
        (", 0, Not", ", 3, Not", "GPU 0: ECC"),
        ("Not Active", "Active", "GPU 0: clocks"),
    ],
)
def test_a_gpu_that_is_not_well(tmp_path, was, becomes, what):
    machine = Machine(tmp_path)
    machine.gpu = machine.gpu.replace(was, becomes, 1)
    assert on_host(machine).wrong == [what]


def test_a_gpu_in_instances(tmp_path):
    machine = Machine(tmp_path)
    machine.gpu = machine.gpu.replace("Disabled", "Enabled")
    table = on_host(machine)
    assert not table.wrong and "through host memory" in table["GPU 0: MIG"][1]


@pytest.mark.parametrize(
    "was, becomes",
    [
        ("81559, 80000", "[Insufficient Permissions], [Insufficient Permissions]"),  # a container with a part of a GPU
        ("81559, 80000", "[N/A], [N/A]"),  # a GB10, whose memory is the host's
    ],
)
def test_memory_of_which_nvidia_smi_says_nothing(tmp_path, was, becomes):
    machine = Machine(tmp_path)
    machine.gpu = machine.gpu.replace(was, becomes).replace(", 0, Not", f", {becomes.split(', ')[0]}, Not")
    table = on_host(machine)
    assert not table.wrong and table["GPU 0: memory"] == (None, f"nvidia-smi says {becomes.split(', ')[0]}")
    assert table["GPU 0: clocks"] == (True, "free")


def test_gpus_that_this_process_does_not_use_are_another_ones(tmp_path):
    """A colleague's that is busy, an old display card."""
    machine = Machine(tmp_path, bus_ids=["0000:01:00.0"])
    others = (("0, N", "1, N"), ("80000", "100"), ("9.0", "6.1"), ("00000000:01", "00000000:02"))
    other = machine.gpu
    for was, becomes in others:
        other = other.replace(was, becomes, 1)
    machine.gpu += f"\n{other}"
    table = on_host(machine)
    assert not table.wrong and "GPU 0" in table and "GPU 1" not in table
    machine = Machine(tmp_path, bus_ids=[], driver="the NVIDIA driver serves CUDA up to 12.2")
    machine.gpu += f"\n{other}"
    assert on_host(machine).wrong == ["driver and torch", "GPU 1", "GPU 1: memory"], "nothing is known of them"


# ---- copies ----


def on_gpus(gpus: Host, held: list[int] | None = None) -> Table:
    @contextmanager
    def hold(device, num_bytes):
        if held is not None:
            held.append(device)
        region = DeviceRegion(CudaRuntime(Cudart(gpus)), device, num_bytes)
        yield region.handle
        region.close()

    table = Table()
    copies.check(table, None, CudaRuntime(Cudart(gpus)), hold, num_bytes=1 << 20)
    return table


def test_copies_between_gpus():
    table = on_gpus(Host())
    assert len(table) == 4 and not table.wrong and "GB/s; opened in" in table["GPU 0 to GPU 1"][1]


def test_a_process_holds_a_region_for_all_that_take_from_it():
    """Each takes a second to have a CUDA context: of 8 GPUs it was 64 of them, and the step has 50 s."""
    held: list[int] = []
    on_gpus(Host(), held)
    assert held == [0, 1]


def test_copies_that_arrive_wrong():
    gpus = Host()
    gpus.breaks_copies = True
    table = on_gpus(gpus)
    assert len(table.wrong) == 4 and "arrived wrong, although CUDA offers copies" in table["GPU 0 to GPU 1"][1]


def test_gpus_without_copies():
    table = on_gpus(Host(peers=frozenset()))
    assert not table.wrong and table["GPU 0 to GPU 1"][0] is None and table["GPU 1 to GPU 1"][0] is True


def test_memory_that_is_full():
    table = on_gpus(Host(num_bytes=1000))
    assert len(table.wrong) == 4 and table["GPU 0 to GPU 0"][1].startswith("cudaMalloc: ")


# ---- kernels ----

interpreted = pytest.mark.skipif(triton_kernels.INTERPRETED is False, reason="Triton's interpreter is off here")


@interpreted
def test_kernels_that_are_right(monkeypatch):
    monkeypatch.setattr(kernels, "FORMS", ("bf16", "int4-g128"))
    monkeypatch.setattr(kernels, "ROWS", (1, 20))
    monkeypatch.setattr(kernels, "LENGTHS", ((1, 300), (3, 40)))
    table = Table()
    kernels.check(table, None, CPU, (32, 128), (4, 2, 16))
    assert not table.wrong and len(table) == 6
    assert "rows alone have the bits of a batch" in table["bf16 product, exact"][1]


@interpreted
def test_kernels_that_are_wrong(monkeypatch):
    monkeypatch.setattr(kernels, "FORMS", ("bf16",))
    monkeypatch.setattr(kernels, "ROWS", (1, 20))
    monkeypatch.setattr(kernels, "LENGTHS", ((1, 40),))
    call = kernels.GpuChoice.__call__
    monkeypatch.setattr(kernels.GpuChoice, "__call__", lambda *given: lambda x: call(*given)(x) * (1 + len(x) % 2))
    table = Table()
    kernels.check(table, None, CPU, (32, 64), (4, 2, 16))
    assert table.wrong == ["bf16 product, exact", "bf16 product, fast"]
    assert "A ROW ALONE DIFFERS" in table["bf16 product, exact"][1].upper()


# ---- graphs and engine ----


class Stepping:
    """An engine whose tokens depend on whether it has graphs as a test says."""

    def __init__(self, num_graphs: int, eager: int):
        self.launcher = SimpleNamespace(num_graphs=num_graphs, without_graphs=self.without_graphs)
        self._eager, self._difference = eager, 0

    @contextmanager
    def without_graphs(self):
        self._difference = self._eager
        yield
        self._difference = 0

    def ids(self, count):
        return list(range(count))

    def answers(self, prompts, num_output, **sampling):
        return [[len(ids) + self._difference] for ids in prompts]

    def close(self):
        pass


@pytest.mark.parametrize(
    "num_graphs, eager, wrong", [(9, 0, []), (0, 0, ["capture"]), (9, 1, ["tokens, greedy", "tokens, top_p"])]
)
def test_the_graphs_step_fails_without_graphs_and_for_other_tokens(monkeypatch, num_graphs, eager, wrong):
    monkeypatch.setattr(graphs, "RandomEngine", lambda *_, **__: Stepping(num_graphs, eager))
    table = Table()
    graphs.check(table, None, CPU)
    assert table.wrong == wrong


@pytest.mark.parametrize("num_compiled, grown", [(0, 0), (1, 0), (0, 1 << 20)])
def test_steps_of_an_engine(monkeypatch, num_compiled, grown):
    """A kernel that is compiled, or memory that is taken, while requests are served is a failure."""
    counts, held = [], []

    def make(*given, **options):
        made = RandomEngine(*given, **options)
        made.launcher.compiling = Counting(counts, num_compiled)
        return made

    monkeypatch.setattr(engine, "RandomEngine", make)
    monkeypatch.setattr(engine, "_held", lambda device: held.append(grown) or grown * len(held))
    table = Table()
    engine.check(table, None, CPU, TINY, batches=(2,), num_steps=5)
    assert len(table) == 2 and (len(table.wrong) == 2) == bool(num_compiled or grown)
    assert " ms a step, " in table["batch 2, greedy"][1]


def test_batches_that_a_gpu_has_no_room_for_are_left_out(monkeypatch):
    """An 8B model is 15 GiB, and its pool for 256 sequences 19: no card of 24 or 32 GB has room."""
    made = []
    monkeypatch.setattr(engine, "_free", lambda device: 23.5 * GIB)
    monkeypatch.setattr(
        engine, "RandomEngine", lambda *given, max_num_seqs, **options: made.append(max_num_seqs) or 1 / 0
    )
    table = Table()
    with pytest.raises(ZeroDivisionError):
        engine.check(table, None, CPU)
    assert made == [64] and table == {"batch 256": (None, "takes 35.7 GiB, and 23.5 are free")}
    monkeypatch.setattr(engine, "_free", lambda device: 15.0 * GIB)
    table = Table()
    engine.check(table, None, CPU)
    assert made == [64] and [*table] == ["batch 1", "batch 64", "batch 256"] and not table.wrong


def test_what_is_measured_takes_no_more_than_what_came_before(monkeypatch):
    """With many prompts the first ones would end before the last ones are read: then no draw before is of all rows."""
    rows = [0]

    def make(*given, **options):
        made = RandomEngine(*given, **options)
        run = made.launcher.run
        made.launcher.run = lambda batch, *rest: rows.append(len(batch.logit_rows)) or run(batch, *rest)
        made.engine._multi_step = None
        return made

    monkeypatch.setattr(engine, "RandomEngine", make)
    monkeypatch.setattr(engine, "PROMPT", 400)
    monkeypatch.setattr(engine, "_held", lambda device: max(rows) << 20)  # an allocator keeps what the largest took
    table = Table()
    engine.check(table, None, CPU, TINY, batches=(40,), num_steps=12)
    assert max(rows) == 40 and not table.wrong, table


class Counting:
    """A watch that counts more each time it is read."""

    def __init__(self, reads: list, step: int):
        self._reads, self._step = reads, step

    @property
    def num_kernels(self) -> int:
        self._reads.append(1)
        return self._step * len(self._reads)


# ---- stacks ----


class Stacks(list):
    """The flags of each stack that a step starts; what `baton up` does not take ends the test."""

    @contextmanager
    def __call__(self, *flags):
        parser = argparse.ArgumentParser()
        up.add_parser(parser.add_subparsers())
        parser.parse_args(["up", *flags])
        self.append(flags)
        yield "target", None


@pytest.mark.parametrize("answers, wrong", [(("text", "text"), []), (("text", "test"), ["split equals whole"])])
def test_a_split_stack_answers_as_a_whole_one(monkeypatch, tmp_path, answers, wrong):
    stacks, asked = Stacks(), iter(answers)
    monkeypatch.setattr(workers, "stack", stacks)
    monkeypatch.setattr(workers, "answer", lambda target: next(asked))
    monkeypatch.setattr(workers, "_transport", lambda say, target: None)
    table = Table()
    workers.check(table, tmp_path)
    assert table.wrong == wrong and [("always" in flags) for flags in stacks] == [True, False]


@pytest.mark.parametrize("step", [workers, faults, groups], ids=["workers", "faults", "groups"])
def test_workers_are_started_with_the_demo_model(monkeypatch, tmp_path, step):
    """A given one that fits once on a GPU, or takes longer to read than a step has, was called a failure."""
    started = []

    def up(argv, **options):
        started.append(argv)
        raise InterruptedError

    monkeypatch.setattr(workers.subprocess, "Popen", up)
    monkeypatch.setattr(faults, "_lost_device", lambda say, faulty: None)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    loaded = []
    monkeypatch.setattr(groups, "found_with", lambda folder, degree: loaded.append(folder) or TWO)
    with pytest.raises(InterruptedError):
        step.check(Table(), tmp_path)
    assert started[0][started[0].index("--model") + 1] == str(SHIPPED_MODEL)
    assert set(loaded) <= {SHIPPED_MODEL}


@pytest.mark.parametrize(
    ("chosen", "peers", "is_right"),
    [
        ("cuda_ipc is chosen", {(0, 1), (1, 0)}, True),
        ("shm is chosen", {(0, 1), (1, 0)}, False),
        ("shm is chosen", set(), None),  # as step `copies` says
    ],
)
def test_the_transport_of_gpus_that_do_not_reach_each_other_is_another(monkeypatch, chosen, peers, is_right):
    said = json.dumps({"checks": [{"part": "handoff", "text": chosen}]})
    monkeypatch.setattr(workers.subprocess, "run", lambda *_, **__: SimpleNamespace(stdout=said, stderr=""))
    monkeypatch.setattr(workers, "find_runtime", lambda: CudaRuntime(Cudart(Host(peers=frozenset(peers)))))
    table = Table()
    workers._transport(table, "target")
    assert table["transport"][0] is is_right and table["transport"][1].startswith(chosen)


# ---- two GPUs ----

SUMS = groups.SumSpeed(12.0, 80e9, 900e9)
TWO = groups.Continuation([1, 2, 3], 5, SUMS, "")
ALONE = groups.Continuation([1, 2, 3], 5)


def on_two_gpus(monkeypatch, tmp_path, two=TWO, alone=ALONE, answers=("text", "text"), count=2) -> Table:
    def found_with(folder, degree):
        if isinstance(two, ValueError):
            raise two
        return two if degree == 2 else alone

    asked = iter(answers)

    stacks = Stacks()
    monkeypatch.setattr(torch.cuda, "device_count", lambda: count)
    monkeypatch.setattr(groups, "found_with", found_with)
    monkeypatch.setattr(groups, "stack", stacks)
    monkeypatch.setattr(groups, "answer", lambda target: next(asked))
    table = Table()
    groups.check(table, tmp_path)
    assert [("--prefill.tensor-parallel" in flags) for flags in stacks] in ([True, False], [])
    return table


def test_the_step_of_two_ranks_reports_sums_tokens_and_handoff(monkeypatch, tmp_path):
    table = on_two_gpus(monkeypatch, tmp_path)
    assert not table.wrong and len(table) == 5
    assert table["a sum"][1] == "of one row takes 12 us, of a step 80.0 GB/s, a copy 900.0"


@pytest.mark.parametrize(
    ("changed", "wrong"),
    [
        ({"alone": ALONE._replace(token_ids=[1, 2, 4])}, ["tokens of one GPU"]),
        ({"two": TWO._replace(num_graphs=0)}, ["captured sums"]),
        ({"two": ValueError("tensor_parallel 2: torch 2 has no NCCL")}, ["two ranks", "KV of two ranks to one"]),
        ({"answers": ("text", "test")}, ["KV of two ranks to one"]),
        ({"answers": ("", "")}, ["KV of two ranks to one"]),
    ],
    ids=str,
)
def test_two_ranks_that_are_not_well(monkeypatch, tmp_path, changed, wrong):
    if "two" in changed and isinstance(changed["two"], ValueError):
        changed = changed | {"answers": ("", "text")}
    assert on_two_gpus(monkeypatch, tmp_path, **changed).wrong == wrong


def test_two_gpus_that_do_not_reach_each_other(monkeypatch, tmp_path):
    """Sums go by NCCL then, which is slower, and no fault."""
    table = on_two_gpus(monkeypatch, tmp_path, TWO._replace(why_no_peers="the memory of GPU 1 cannot be reached"))
    assert not table.wrong and table["sums in peers' memory"] == (None, "the memory of GPU 1 cannot be reached")


def test_one_gpu_has_no_ranks(monkeypatch, tmp_path):
    assert on_two_gpus(monkeypatch, tmp_path, count=1) == {"two ranks": (None, "need two GPUs, and 1 can be seen")}


def test_what_an_engine_continues(tmp_path, monkeypatch):
    folder, load = make_model(tmp_path / "tiny"), groups.Engine.load
    monkeypatch.setattr(groups.Engine, "load", lambda config: load(replace(config, device="cpu", num_blocks=16)))
    found = groups.found_with(folder, 1)
    assert len(found.token_ids) == groups.NUM_TOKENS and found.sums is None
    assert found.token_ids == groups.found_with(folder, 1).token_ids


# ---- a model, and faults ----


def test_a_model_beside_transformers(tmp_path, monkeypatch):
    monkeypatch.setattr(model_step, "NUM_PROMPTS", 3)
    monkeypatch.setattr(
        model_step,
        "_engine",
        lambda folder, device: model_step.Engine.load(
            model_step.EngineConfig(folder, device=device, num_blocks=16, max_num_seqs=2, max_num_batched_tokens=128)
        ),
    )
    folder = make_model(tmp_path / "tiny")
    table = Table()
    model_step.check(table, folder, "cpu")
    assert table["logits"][0] is True and "3 of 3 prompts agree" in table["logits"][1]
    ours = model_step._ours
    monkeypatch.setattr(model_step, "_ours", lambda *given: {id_: -9.0 - i for i, id_ in enumerate(ours(*given))})
    table = Table()
    model_step.check(table, folder, "cpu")
    assert table.wrong == ["logits"]


def test_the_engine_is_gone_before_the_model_is_loaded_again(tmp_path, monkeypatch):
    """Both at once were twice its memory."""
    engines, load = [], model_step.Engine.load

    def noted(config):
        made = load(replace(config, num_blocks=16))
        engines.append(weakref.ref(made))
        return made

    def theirs(folder, prompts, device):
        assert engines[0]() is None
        return [dict.fromkeys(range(5000), 0.0) for _ in prompts]

    monkeypatch.setattr(model_step.Engine, "load", noted)
    monkeypatch.setattr(model_step, "NUM_PROMPTS", 1)
    monkeypatch.setattr(model_step, "_theirs", theirs)
    model_step.check(Table(), make_model(tmp_path / "tiny"), "cpu")
    assert engines


def test_a_host_without_transformers(tmp_path, monkeypatch):
    """Which no extra but that of tests has."""
    monkeypatch.setitem(sys.modules, "transformers", None)
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    table = Table()
    model_step.check(table, tmp_path)
    assert table["logits"][0] is None and table["logits"][1].endswith("pip install transformers")


def test_no_model_to_try():
    table = Table()
    model_step.check(table, None)
    assert table == {"logits": (None, "give --model DIR")}


@pytest.mark.parametrize(
    "program, is_right",
    [
        ("import os, time; print(time.time(), flush=True); os._exit(1)", True),
        ("import time; print(time.time(), flush=True); time.sleep(1.2); raise SystemExit(1)", False),
        ("import time; print(time.time(), flush=True); raise SystemExit(3)", False),
        ("raise SystemExit('no CUDA')", False),
    ],
)
def test_a_fault_must_end_its_process(program, is_right):
    table = Table()
    faults._lost_device(table, program)
    assert table["a kernel's fault"][0] is is_right
