"""Totals of runs: what was mended since is told apart from what was not."""

import json

from tests.faults import record


def test_what_is_mended_is_told_apart(tmp_path):
    lines = [
        {"kind": "marathon", "kills": 3, "violations": 2},
        {"kind": "marathon", "kills": 4, "violations": 5, "is_mended": True},
        {"kind": "world", "engine_requests": 10, "differences": 1, "is_mended": True},
        {"kind": "rolls", "rolls": 7},
    ]
    (tmp_path / "faults-2026-01-01.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    found = record.totals(tmp_path)
    assert found == {"runs": 4, "kills": 7, "violations": 2, "mended": 6, "engine_requests": 10, "rolls": 7}
