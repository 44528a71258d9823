"""Totals of runs: what was mended since is told apart, and the last run of each kind says what stands."""

import json

from tests.faults import record


def test_what_is_mended_is_told_apart(tmp_path):
    lines = [
        {"kind": "marathon", "seconds": 7200, "kills": 3, "violations": 2},
        {"kind": "marathon", "seconds": 7200, "kills": 4, "violations": 5, "is_mended": True},
        {"kind": "marathon", "seconds": 7200, "kills": 1, "violations": 0},
        {"kind": "marathon", "seconds": 60, "kills": 1, "violations": 0},
        {"kind": "world", "engine_requests": 10, "differences": 1, "is_mended": True},
        {"kind": "rolls", "rolls": 7},
    ]
    (tmp_path / "faults-2026-01-01.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    found = record.totals(record.read(tmp_path))
    counts = {"kills": 9, "violations": 2, "mended": 6, "engine_requests": 10, "rolls": 7, "marathons": 1}
    assert found == {"runs": 6, **counts}


def test_the_last_run_of_a_kind_says_whether_it_is_broken():
    passed, failed = {"violations": 0, "failed": 0}, {"violations": 1, "failed": 0}
    lines = [{"kind": "marathon", **failed}, {"kind": "rolls", "rolls_failed": 0}, {"kind": "marathon", **passed}]
    assert record.broken(lines) == []
    lines += [{"kind": "marathon", **failed, "is_mended": True}, {"kind": "rolls", "rolls_failed": 1}]
    assert record.broken(lines) == ["marathon", "rolls"], "mended, but not run since"
