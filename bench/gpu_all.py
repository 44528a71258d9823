"""Everything that waits for a GPU, in order: python bench/gpu_all.py FOLDER [--only JOB ...] [--quick].

`baton doctor --gpu` comes before it, and what that covers is not done again here. Correctness first, then every part of
bench/gpu.py, then the handoff. Each job is a process of its own that is ended after --limit-s, so that a host that
grants ten minutes at a time can be given the jobs one by one; FOLDER gets JOB.txt, what it printed, and JOB.json, its
rows. Ends with the number of jobs that did not end with 0 (a bench that missed a goal ends with 1); without a CUDA
device with 2 and one line.
"""

if not __package__:  # started by its path
    from lib.as_module import run

    run()

import argparse
import os
import subprocess
import sys
from pathlib import Path

from bench.lib import gpu_limits

ROOT = Path(__file__).resolve().parents[1]
LIMIT_S = 560
PARTS = ("decode", "batches", "kv", "prefill", "overhead", "hit", "exact", "interfere", "peers")
TESTS = ("-m", "pytest", "-q", "-p", "no:cacheprovider", "--basetemp")


def jobs(folder: Path, quick: bool) -> dict[str, list[str]]:
    """Name -> arguments of python. Kernels also run compiled: their suites take the GPU where there is one."""
    kernels = [
        "tests/engine/models/test_gpu_layers.py", "tests/engine/kernels/test_grouped.py",
        "tests/engine/kernels/test_low_rank.py", "tests/engine/recurrent/test_gpu_mixers.py",
        "tests/engine/sampling/test_on_device.py",
    ]  # fmt: skip
    attention = ["tests/engine/kernels/test_kv_write.py"]
    attention += sorted(str(path.relative_to(ROOT)) for path in ROOT.glob("tests/engine/attention/test_attention_*.py"))
    short = ["--quick"] if quick else []
    found = {
        "gpu-tests": [*TESTS, f"{folder}/tmp", "-m", "gpu"],
        "kernel-tests": [*TESTS, f"{folder}/tmp", *kernels, *attention],
    }
    for part in PARTS:
        found[part] = ["bench/gpu.py", "--only", part, "--json", f"{folder}/{part}.json", *short]
    found["forced"] = ["bench/forced.py", "--json", f"{folder}/forced.json", *short]
    found["handoff"] = ["bench/handoff.py", "--json", f"{folder}/handoff.json", *short]
    return found


def run(name: str, arguments: list[str], folder: Path, limit_s: int) -> int:
    """Its exit status; 124 where it took too long."""
    with open(folder / f"{name}.txt", "w") as out:
        try:
            done = subprocess.run(
                [sys.executable, *arguments], cwd=ROOT, stdout=out, stderr=subprocess.STDOUT, timeout=limit_s,
                env=os.environ | {"PYTHONUNBUFFERED": "1"},
            )  # fmt: skip
            return done.returncode
        except subprocess.TimeoutExpired:
            out.write(f"ended after {limit_s} s\n")
            return 124


def main() -> int:
    parser = argparse.ArgumentParser(prog="bench/gpu_all.py", description="Everything that waits for a GPU.")
    parser.add_argument("folder", type=Path, metavar="FOLDER", help="where the results go")
    names = tuple(jobs(Path(), False))
    parser.add_argument("--only", nargs="+", choices=names, default=names, metavar="JOB", help="%(choices)s")
    parser.add_argument("--quick", action="store_true", help="fewer rounds")
    parser.add_argument("--limit-s", type=int, default=LIMIT_S, metavar="S", help=f"of one job (default {LIMIT_S})")
    arguments = parser.parse_args()
    if why := gpu_limits.missing():
        print(f"bench/gpu_all.py: needs a CUDA device: {why}", file=sys.stderr)
        return 2
    folder = arguments.folder.resolve()
    folder.mkdir(parents=True, exist_ok=True)
    num_failed = 0
    for name in arguments.only:
        status = run(name, jobs(folder, arguments.quick)[name], folder, arguments.limit_s)
        print(f"{name}: {'ok' if status == 0 else f'ended with {status}'}", flush=True)
        num_failed += status != 0
    return num_failed


if __name__ == "__main__":
    sys.exit(main())
