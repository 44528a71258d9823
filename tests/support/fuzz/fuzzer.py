"""Plans drawn from seeds, obeyed one after the other; the first that fails is made small, and printed with how to see
it again."""

import json
import re
import time
import traceback
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

from tests.support.fuzz.shrink import Plan, Shrinker
from tests.support.process import ROOT

SEED_STEP = 1 << 20  # of one seed's plans to those of the next
MAX_TRIES = 2000


class Fuzzer(NamedTuple):
    """`draw(seed)` makes a plan; `obey(plan)` counts what there was, and raises where something is wrong."""

    name: str
    draw: Callable[[int], Plan]
    obey: Callable[[Plan], Counter[str]]
    counted: str = "requests"


class Found(NamedTuple):
    """A failure, and the smallest plan that fails alike."""

    plan: Plan
    words: str
    trace: str


def fuzz(
    fuzzer: Fuzzer, count: int, seed: int, ends_at: float = float("inf"), max_tries: int = MAX_TRIES
) -> tuple[Counter[str], Found | None]:
    """Obey plans until `count` of what is counted were seen, or time is up (time.monotonic()). `max_tries`: to make the
    first that fails small."""
    counts: Counter[str] = Counter()
    number = seed * SEED_STEP
    while counts[fuzzer.counted] < count and time.monotonic() < ends_at:
        plan = fuzzer.draw(number)
        try:
            counts += fuzzer.obey(plan)
        except Exception:
            counts["differences"] += 1
            failed = traceback.format_exc(limit=-8)
            found = shrunk(fuzzer, plan, max_tries)
            return counts, found if found.words else Found(plan, "it did not fail again", failed)
        counts["worlds"] += 1
        number += 1
    return counts, None


def shrunk(fuzzer: Fuzzer, plan: Plan, max_tries: int = MAX_TRIES) -> Found:
    """Return the smallest failing plan, and its failure."""
    plan = Shrinker(lambda plan: _fault(fuzzer, plan)[0], max_tries).shrink(plan)
    return Found(plan, *_fault(fuzzer, plan))


def _fault(fuzzer: Fuzzer, plan: Plan) -> tuple[str, str]:
    """Return how a plan fails, in words without numbers, and in full; empty if it does not."""
    try:
        fuzzer.obey(plan)
    except Exception as error:
        kind = re.sub(r"[^a-zA-Z ]+", "", str(error).split(":")[0].split("[")[0])[:40]
        return f"{type(error).__name__} {kind}".strip(), traceback.format_exc(limit=-8)
    return "", ""


def words(found: Found) -> str:
    """Return all that is needed to see it again."""
    text = json.dumps(found.plan)
    num_requests, num_ops = len(found.plan["requests"]), len(found.plan.get("ops") or found.plan.get("faults", ()))
    return (
        f"{found.trace}\n{found.words}: a plan of {num_requests} requests and {num_ops} operations; again with\n"
        f"  python -m tests.fuzz --replay '{text}'"
    )


def read_plan(text: str) -> Plan:
    """Return a plan from JSON, or from a file of it."""
    return json.loads(text if text.lstrip().startswith("{") else (ROOT / Path(text)).read_text())
