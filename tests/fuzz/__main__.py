"""python -m tests.fuzz toy|real COUNT [--seed N], or --replay PLAN (JSON, or a file of it)."""

import argparse
import random
import sys

import torch

from tests.support.fuzz import fuzzers
from tests.support.fuzz.fuzzer import fuzz, read_plan, words


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.fuzz", description=__doc__)
    parser.add_argument("what", nargs="?", choices=tuple(fuzzers.ALL), default="toy")
    parser.add_argument("count", type=int, nargs="?", default=1000)
    parser.add_argument("--seed", type=int, default=random.randrange(1 << 30))
    parser.add_argument("--replay", metavar="PLAN")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    if arguments.replay:
        plan = read_plan(arguments.replay)
        print(dict(fuzzers.ALL[plan["kind"]].obey(plan)))
        return 0
    print(f"{arguments.what} {arguments.count}, seed {arguments.seed}", flush=True)
    counts, found = fuzz(fuzzers.ALL[arguments.what], arguments.count, arguments.seed)
    print(dict(counts))
    if found:
        print(words(found))
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
