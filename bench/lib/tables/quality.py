"""The table of docs/quantization.md from a recorded run: python -m bench.lib.tables.quality FILE writes it to the
page."""

import json
import re
import sys
from pathlib import Path

from bench.lib.paths import ROOT

PAGE = ROOT / "docs" / "quantization.md"
MARKS = re.compile(r"(<!-- quality -->\n).*?(\n<!-- end -->)", re.DOTALL)
HEAD = (
    "| scheme | bytes | bits per byte | against bf16 | goal | against plain rounding | top-1 agreement |\n"
    "|---|---|---|---|---|---|---|"
)


def table(path: Path) -> str:
    """Return Markdown: what was run and when, and a line for each scheme and KV form."""
    report = json.loads(path.read_text())
    found: dict[str, dict[str, dict]] = {}
    sizes = {row["unit"]: int(row["value"]) for row in report["rows"] if row["row"] == "text"}
    for row in report["rows"]:
        name, _, what = row["row"].rpartition(": ")
        if name:
            found.setdefault(name, {})["against" if what.startswith("against") else what] = row
    bf16 = found.pop("bf16")
    lines = [
        f"`{report['command']}`, {report['date']}, {report['machine']['cpu']}, {sizes['tokens']:,} tokens "
        f"({sizes['bytes']:,} bytes) of the held-out modules; recorded in [{path.name}]({_link(path)}).",
        "",
        HEAD,
        f"| bf16 | {int(bf16['weights']['value']):,} | {bf16['bits per byte']['value']:.4f} | | | | |",
        *(_line(name, rows) for name, rows in found.items()),
    ]
    return "\n".join(lines)


def _line(name: str, rows: dict[str, dict]) -> str:
    bits, error = rows["bits per byte"], rows["standard error"]
    goal = {None: "", True: "met", False: "**missed**"}[bits["met"]]
    limit = f"{float(bits['goal'].split()[-1]) - 1:+.1%}, {goal}" if goal else ""
    plain = f"{rows['against']['ratio'] - 1:+.2%}" if "against" in rows else ""
    size = rows.get("weights") or rows.get("KV of a token")
    unit = " a token" if "KV of a token" in rows else ""
    size_text = f"{int(size['value']):,}{unit}" if size else ""
    change = f"{bits['ratio'] - 1:+.2%} ± {error['ratio']:.2%}"
    agreement = f"{rows['top-1 agreement']['value']:.1%}"
    cells = (name, size_text, f"{bits['value']:.4f}", change, limit, plain, agreement)
    return f"| {' | '.join(cells)} |"


def _link(path: Path) -> str:
    return f"../bench/results/{path.name}"


def main() -> int:
    if len(sys.argv) != 2:
        print("usage: python -m bench.lib.tables.quality FILE", file=sys.stderr)
        return 2
    made = table(Path(sys.argv[1]))
    PAGE.write_text(MARKS.sub(lambda match: match[1] + made + match[2], PAGE.read_text()))
    return 0


if __name__ == "__main__":
    sys.exit(main())
