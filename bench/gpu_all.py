"""Everything that needs a GPU, in order: python bench/gpu_all.py FOLDER [--only JOB ...] [--quick].

Run `baton doctor --gpu` first; what it covers is not repeated here. Correctness comes first, then every part of
bench/gpu.py, then bench/forced.py. Each job is a process with a time limit (--limit-s), so a host that grants ten
minutes at a time can run the jobs one by one. FOLDER gets JOB.txt, a job's output, and JOB.json, its rows. The exit
status is the number of jobs that did not end with 0 (a bench that missed a goal ends with 1); without a CUDA device it
is 2, after one line."""

if not __package__:  # started by its path
    from lib.as_module import run

    run()

import argparse
import os
import subprocess
import sys
from pathlib import Path

from bench.gpu import PARTS
from bench.lib import gpu_limits
from bench.lib.paths import ROOT

LIMIT_S = 560
TESTS = ("-m", "pytest", "-q", "-p", "no:cacheprovider", "--basetemp")


def jobs(folder: Path, quick: bool) -> dict[str, list[str]]:
    """Return the arguments of python for each job. Kernel tests run compiled if there is a GPU."""
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
    return found


def run(name: str, arguments: list[str], folder: Path, limit_s: int) -> int:
    """Run a job and return its exit status; 124 if it took too long."""
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
