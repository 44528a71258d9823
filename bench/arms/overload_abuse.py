"""The part `abuse` of bench/overload.py: a canary's time during each abuse of each port, over its time alone."""

import asyncio
from pathlib import Path

from bench.lib.report import Report
from tests.support.abuse.attacked_stack import AttackedStack, Attackers, attacked
from tests.support.abuse.catalogue import Cell, cells
from tests.support.models import make_model

COUNT, QUICK_COUNT = 2000, 100
QUICK = ("silent connections", "many streams", "unread answers")


def abuse(report: Report, folder: Path, quick: bool) -> None:
    """Add a row for each port and abuse, with its worst caller; `against` is the same call's time alone. `quick`: with
    one transport of KV only."""
    model = make_model(folder / "tiny")
    found = [cell for cell in cells() if not quick or cell.abuse.name in QUICK]
    for kv in list(dict.fromkeys(cell.port.kv for cell in found))[: 1 if quick else None]:
        with AttackedStack(model, folder / kv, kv) as stack:
            count = QUICK_COUNT if quick else COUNT
            asyncio.run(_rows(report, stack, [cell for cell in found if cell.port.kv == kv], count))


async def _rows(report: Report, stack: AttackedStack, found: list[Cell], count: int) -> None:
    await stack.warm()
    async with Attackers(2) as attackers:
        for port, name in dict.fromkeys((cell.port.name, cell.abuse.name) for cell in found):
            several = [cell for cell in found if (cell.port.name, cell.abuse.name) == (port, name)]
            seen = [await attacked(stack, attackers, cell, count) for cell in several]
            worst, faults = max(seen, key=lambda each: each.ratio), sum(len(each.faults) for each in seen)
            alone_ms = 1e3 * stack.alone_s[worst.part]
            report.add(f"{port}: {name}: {worst.part}, worst", worst.ratio * alone_ms, "ms", against=alone_ms)
            if faults:
                report.add(f"{port}: {name}: canaries lost, or memory kept", faults, "faults", goal="value <= 0")
