"""The table of docs/faults.md: every case is in it, and every file that it names exists."""

import re

from tests.support.process import ROOT

NUM_CASES = {"A": 16, "B": 10, "C": 11, "D": 14, "E": 14, "F": 12, "G": 11, "H": 14, "S": 14, "J": 5}


def rows() -> list[tuple[str, str]]:
    """(cases, where) of each row."""
    return re.findall(r"^\| ([A-Z]\d.*?) \| .*? \| (.*?) \|$", (ROOT / "docs" / "faults.md").read_text(), re.MULTILINE)


def test_every_case_is_somewhere():
    told = set()
    for cases, _ in rows():
        for first, last in re.findall(r"([A-Z]\d+)(?:-([A-Z]\d+))?", cases):
            last = last or first
            assert first[0] == last[0], cases
            told |= {f"{first[0]}{number}" for number in range(int(first[1:]), int(last[1:]) + 1)}
    assert told == {f"{kind}{number + 1}" for kind, count in NUM_CASES.items() for number in range(count)}


def test_every_file_is_there():
    """A file without a folder is in that of the one before it."""
    names = 0
    for where in (part for _, cell in rows() for part in cell.split(";")):
        folder = ROOT
        for name in re.findall(r"[\w/]+\.py", where):
            if "/" in name:
                folder = (ROOT / name).parent
            assert (folder / name.rpartition("/")[2]).is_file(), f"{name}: {where}"
            names += 1
    assert names > 60
