"""Lines that runs leave in bench/results/, and their totals: python -m tests.faults.record (make fault-report).

A line whose faults were mended since, be they Baton's or a tool's, says so: `"is_mended": true`. Its violations and
differences are told apart. The command ends with 1 where a token was ever wrong, where a total falls short of what is
wanted, or where the last run of a kind broke or failed anything: what an earlier one broke stays in the totals."""

import datetime
import json
import sys
from collections import Counter
from pathlib import Path

from tests.support.process import ROOT

FOLDER = ROOT / "bench" / "results"
# What a line may count; the rest of it is printed as it is.
COUNTS = {
    "kills": "workers killed",
    "streams_hit": "streams that ran then",
    "streams_exact": "of these, answered token for token",
    "marathons": "marathons of two hours that missed no gate",
    "requests": "requests",
    "failed": "failed with two workers of each role",
    "wrong": "answers with a wrong token",
    "freezes": "workers frozen",
    "minutes": "minutes of random faults, each from its own seed",
    "rolls": "rolling restarts of all workers",
    "rolls_failed": "requests failed in them",
    "fuzz_inputs": "fuzz inputs",
    "fuzz_crashes": "of these, that crashed something",
    "digests": "healthy digests compared",
    "false_alarms": "of these, taken for wrong",
    "engine_requests": "requests between two engines, by random plans",
    "stack_requests": "requests of stacks with random faults",
    "stack_faults": "faults that these stacks had",
    "differences": "plans of either that did not end in the undisturbed answer, or left something",
    "mended": "invariants and answers broken by faults that are mended",
    "violations": "invariants broken else",
}

# As many as all runs together are to have.
WANTED = {"kills": 1000, "marathons": 1, "rolls": 100, "minutes": 100, "fuzz_inputs": 1_000_000, "digests": 1_000_000}
WANTED |= {"engine_requests": 100_000, "stack_requests": 10_000, "stack_faults": 200}

TWO_HOURS = 7200  # seconds
BREAKS = ("failed", "wrong", "rolls_failed", "fuzz_crashes", "false_alarms", "differences", "violations")


def append(kind: str, seed: int, **values) -> Path:
    """One line for one run."""
    date = datetime.datetime.now(datetime.UTC).date().isoformat()
    path = FOLDER / f"faults-{date}.jsonl"
    with path.open("a") as file:
        file.write(json.dumps({"kind": kind, "date": date, "seed": seed, **values}) + "\n")
    return path


def read(folder: Path = FOLDER) -> list[dict]:
    """Return all lines, in the order of the runs."""
    paths = sorted(folder.glob("faults-*.jsonl"))
    return [json.loads(line) for path in paths for line in path.read_text().splitlines()]


def totals(lines: list[dict]) -> Counter:
    """Return the sums of all that lines count."""
    found = Counter({"runs": len(lines)})
    for line in lines:
        counts = Counter({name: line[name] for name in COUNTS if name in line})
        if line["kind"] == "marathon" and line.get("seconds", 0) >= TWO_HOURS and not line["violations"]:
            counts["marathons"] = 1
        if line.get("is_mended"):
            counts["mended"] = counts.pop("violations", 0) + counts.pop("differences", 0)
        found.update(counts)
    return found


def broken(lines: list[dict]) -> list[str]:
    """Return the kinds whose last run failed a request, broke an invariant or had an answer that differed."""
    last = {line["kind"]: line for line in lines}
    return [kind for kind, line in last.items() if any(line.get(name) for name in BREAKS)]


def main() -> int:
    lines = read()
    found, last_broken = totals(lines), broken(lines)
    if not lines:
        print(f"no run has left a line in {FOLDER.relative_to(ROOT)}")
        return 1
    print(f"{found['runs']} runs")
    for name, words in COUNTS.items():
        wanted = f" ({WANTED[name]:,} wanted)" if name in WANTED else ""
        print(f"{found[name]:>12,}  {words}{wanted}")
    if found["streams_hit"]:
        print(
            f"{100 * found['streams_exact'] / found['streams_hit']:>11.2f}%  exact match of the streams that were hit"
        )
    short = [COUNTS[name] for name, wanted in WANTED.items() if found[name] < wanted]
    for what, names in (("fewer than are wanted", short), ("broken in the last run", last_broken)):
        if names:
            print(f"{what}: {', '.join(names)}")
    return 1 if found["wrong"] or short or last_broken else 0


if __name__ == "__main__":
    sys.exit(main())
