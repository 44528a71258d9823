"""The table of docs/quantization.md is what the recorded run says."""

import json
import re

from bench.lib.tables.quality import table
from tests.support.process import ROOT

PAGE = ROOT / "docs" / "quantization.md"


def test_the_page_quotes_the_recorded_run():
    text = PAGE.read_text()
    (drawn,) = re.findall("<!-- quality -->\n(.*?)\n<!-- end -->", text, re.DOTALL)
    (name,) = re.findall(r"\]\(\.\./bench/results/(quality-[\w.-]+\.json)\)", drawn)
    assert drawn.strip() == table(ROOT / "bench" / "results" / name)


def test_rows_become_lines(tmp_path):
    def row(name, value, unit="bits/byte", against=None, goal="", met=None):
        ratio = value / against if against else None
        return {"row": name, "value": value, "unit": unit, "against": against, "ratio": ratio, "goal": goal, "met": met}

    rows = [
        row("text", 2000, "bytes"),
        row("text", 500, "tokens"),
        row("bf16: bits per byte", 1.0),
        row("bf16: weights", 4000, "bytes"),
        row("kv int8: bits per byte", 1.01, against=1.0, goal="ratio <= 1.005", met=False),
        row("kv int8: standard error", 0.001, against=1.0),
        row("kv int8: top-1 agreement", 0.97, "share"),
        row("kv int8: KV of a token", 100, "bytes", against=200),
        row("int4-gptq g32: bits per byte", 1.02, against=1.0, goal="ratio <= 1.03", met=True),
        row("int4-gptq g32: standard error", 0.002, against=1.0),
        row("int4-gptq g32: top-1 agreement", 0.9, "share"),
        row("int4-gptq g32: weights", 1000, "bytes", against=4000),
        row("int4-gptq g32: against int4-rtn", 1.02, against=1.04, goal="ratio <= 1.0", met=True),
    ]
    report = {"command": "python bench/quality.py", "date": "2026-01-01", "machine": {"cpu": "CPU"}, "rows": rows}
    (tmp_path / "r.json").write_text(json.dumps(report))
    lines = table(tmp_path / "r.json").splitlines()
    assert "500 tokens (2,000 bytes)" in lines[0]
    assert lines[-3] == "| bf16 | 4,000 | 1.0000 | | | | |"
    assert lines[-2] == "| kv int8 | 100 a token | 1.0100 | +1.00% ± 0.10% | +0.5%, **missed** |  | 97.0% |"
    assert lines[-1] == "| int4-gptq g32 | 1,000 | 1.0200 | +2.00% ± 0.20% | +3.0%, met | -1.92% | 90.0% |"
