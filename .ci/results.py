"""Sum up one run of the tests, and note in a file which were flaky: .ci/results.py FOLDER FILE.

FOLDER holds first.xml and, where something was run once more, again.xml (JUnit). A test that failed first and then
passed is flaky. FILE gets a line of JSON for each run; at most 1 flaky test in 2,000 is what the project allows itself.
"""

import json
import sys
import time
import xml.etree.ElementTree as tree
from collections import Counter
from pathlib import Path

ALLOWED = 1 / 2000
NUM_RUNS = 20  # that the share is taken over


def read_outcomes(path: Path) -> dict[str, str]:
    """Return the outcome of each test: passed, failed or skipped."""
    outcomes = {}
    for case in tree.parse(path).getroot().iter("testcase"):
        children = {child.tag for child in case}
        failed = children & {"failure", "error"}
        outcomes[f"{case.get('classname')}::{case.get('name')}"] = (
            "failed" if failed else "skipped" if "skipped" in children else "passed"
        )
    return outcomes


def find_flaky(first: dict[str, str], again: dict[str, str]) -> list[str]:
    return sorted(name for name, outcome in first.items() if outcome == "failed" and again.get(name) == "passed")


def note_run(path: Path, num_tests: int, flaky: list[str]) -> str:
    """Append this run to `path`; return one line about the last runs."""
    run = {"date": time.strftime("%Y-%m-%d", time.gmtime()), "tests": num_tests, "flaky": flaky}
    with path.open("a") as file:
        file.write(json.dumps(run) + "\n")
    runs = [json.loads(line) for line in path.read_text().splitlines()][-NUM_RUNS:]
    num_flaky, total = sum(len(run["flaky"]) for run in runs), sum(run["tests"] for run in runs)
    names = Counter(name for run in runs for name in run["flaky"])
    most = ", ".join(f"{name} ({count})" for name, count in names.most_common(3))
    return (
        f"flaky in the last {len(runs)} runs: {num_flaky} of {total:,} tests"
        f" ({'within' if num_flaky <= ALLOWED * total else 'BEYOND'} 1 in {1 / ALLOWED:,.0f})"
        + (f": {most}" if most else "")
    )


def main(folder: Path, noted: Path) -> None:
    try:
        first = read_outcomes(folder / "first.xml")
    except (OSError, tree.ParseError):
        sys.exit("no test results")
    again = read_outcomes(folder / "again.xml") if (folder / "again.xml").exists() else {}
    flaky = find_flaky(first, again)
    count = Counter(first.values())
    print(note_run(noted, len(first), flaky))
    print(f"{count['passed'] + len(flaky)} passed, {count['failed'] - len(flaky)} failed, {count['skipped']} skipped")


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
