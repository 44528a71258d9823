"""Lines that runs leave in bench/results/, and their totals: python -m tests.faults.record (make fault-report).

A line whose faults were mended since, be they Baton's or a tool's, says so: `"is_mended": true`. Its violations and
differences are told apart."""

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
WANTED = {"kills": 1000, "rolls": 100, "minutes": 100, "fuzz_inputs": 1_000_000, "digests": 1_000_000}
WANTED |= {"engine_requests": 100_000, "stack_requests": 10_000, "stack_faults": 200}


def append(kind: str, seed: int, **values) -> Path:
    """One line for one run."""
    date = datetime.datetime.now(datetime.UTC).date().isoformat()
    path = FOLDER / f"faults-{date}.jsonl"
    with path.open("a") as file:
        file.write(json.dumps({"kind": kind, "date": date, "seed": seed, **values}) + "\n")
    return path


def totals(folder: Path = FOLDER) -> Counter:
    lines = [
        json.loads(line) for path in sorted(folder.glob("faults-*.jsonl")) for line in path.read_text().splitlines()
    ]
    found = Counter({"runs": len(lines)})
    for line in lines:
        if line.get("is_mended"):
            line["mended"] = line.pop("violations", 0) + line.pop("differences", 0)
        found.update({name: line[name] for name in COUNTS if name in line})
    return found


def main() -> int:
    found = totals()
    if not found["runs"]:
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
    return 1 if found["wrong"] or found["violations"] or found["differences"] else 0


if __name__ == "__main__":
    sys.exit(main())
