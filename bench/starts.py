"""Measure the start of a stack until it serves: python bench/starts.py [--quick] [--json FILE].

`baton up` starts the demo model (a gateway, a prefill and a decode worker, in parallel) until its ready line, on every
tier that this machine has, in turn with a process that only imports torch. CPU time is that of all processes of the
stack up to then. The kernels are built and the roofline is cached before, as after the first start on a machine; the
first measurement of the roofline has its own row."""

if not __package__:  # started by its path
    from lib.as_module import run

    run()

import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from baton.engine.native.tier import available
from bench.lib.cpu_time import tree_cpu_s
from bench.lib.paths import MODEL, ROOT
from bench.lib.report import Report, finish, start
from tests.support.process import Process

SHARE, ALLOWANCE_S = 1.3, 1.0  # the goal of a start: times one process's `import torch`, and on top of it
ROOFLINE = """
import time
from pathlib import Path
from baton.engine.core.config import EngineConfig
from baton.engine.engine import Engine
from baton.worker.observe import roofline
engine = Engine.load(EngineConfig(model=Path("demo/target"), num_blocks=64))
model, begun = engine.runner.model, time.perf_counter()
roofline.measure(model.device, roofline._product(engine.config, model.device, model.dtype))
print(time.perf_counter() - begun)
"""


def import_torch() -> tuple[float, float]:
    """Return wall and CPU seconds of a process that imports torch and ends."""
    before, begun = _children_s(), time.monotonic()
    subprocess.run([sys.executable, "-c", "import torch"], check=True)
    return time.monotonic() - begun, _children_s() - before


def start_stack(folder: Path, env: dict[str, str]) -> tuple[float, float]:
    """Return wall and CPU seconds until the ready line."""
    argv = [sys.executable, "-m", "baton.cli.main", "up", "--model", str(MODEL), "--listen", "127.0.0.1:0"]
    process = Process("up", argv, folder, env)
    try:
        process.ready()
        return time.monotonic() - process.started, tree_cpu_s(process.pid)
    finally:
        assert process.stop() == 0, process.tail()


def measure_roofline(env: dict[str, str]) -> float:
    """Return the seconds that a worker's first start on a machine measures for."""
    argv = [sys.executable, "-c", ROOFLINE]
    done = subprocess.run(argv, env=os.environ | env, cwd=ROOT, check=True, capture_output=True, text=True)
    return float(done.stdout)


def _children_s() -> float:
    used = os.times()
    return used.children_user + used.children_system


def measure(report: Report, folder: Path, num_rounds: int) -> None:
    """Add all rows."""
    tiers = [tier.name for tier in available()]
    torch_s: list[tuple[float, float]] = []
    stack_s: dict[str, list[tuple[float, float]]] = {name: [] for name in tiers}
    import_torch()  # brings the files into memory
    for index in range(-1, num_rounds):
        torch_s.append(import_torch())
        for name in tiers:
            own = folder / f"{name}-{index}"
            own.mkdir()
            found = start_stack(own, {"BATON_ISA": name})
            if index >= 0:  # the first run builds and measures what later ones find
                stack_s[name].append(found)
    wall_s, cpu_s = (statistics.median(column) for column in zip(*torch_s, strict=True))
    report.add("import torch, one process: wall", wall_s, "s")
    report.add("import torch, one process: CPU", cpu_s, "s")
    for name in tiers:
        walls, cpus = zip(*stack_s[name], strict=True)
        goal = f"value <= {SHARE * wall_s + ALLOWANCE_S:.1f}"
        report.add(f"{name}: start to ready: wall", statistics.median(walls), "s", against=wall_s, goal=goal)
        report.add(f"{name}: start to ready: CPU, all processes", statistics.median(cpus), "s", against=cpu_s)
        seconds = statistics.median(measure_roofline({"BATON_ISA": name}) for _ in range(num_rounds))
        report.add(f"{name}: measure the roofline", 1e3 * seconds, "ms", goal="value <= 200")


def main() -> int:
    arguments, report = start("starts", "From `baton up` to ready, at every tier of this machine.")
    with tempfile.TemporaryDirectory() as folder:
        measure(report, Path(folder), 1 if arguments.quick else 5)
    return finish(arguments, report)


if __name__ == "__main__":
    sys.exit(main())
