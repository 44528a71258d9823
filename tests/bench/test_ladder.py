"""The naive server of bench/ladder.py is made by who submits what and when: its rules, seen on a small model."""

import asyncio
import json
import random
from pathlib import Path

import pytest

from baton.loadgen.outcome import Outcome
from bench.arms.naive_server import Rung, Technique
from bench.lib import sending
from bench.lib.sending import job_of
from bench.lib.tables import ladder
from tests.support.models import make_model

CONTEXT, BLOCK, PLACES, RESERVED = 512, 16, 8, 3
NAIVE = dict(
    dtype="fp32",
    attention="reference",
    linear="dense",
    block_size=BLOCK,
    num_blocks=RESERVED * CONTEXT // BLOCK,
    max_model_len=CONTEXT,
    max_num_seqs=PLACES,
    max_num_batched_tokens=CONTEXT + PLACES,
)


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> Path:
    return make_model(tmp_path_factory.mktemp("model") / "tiny")


@pytest.fixture
def jobs():
    """Prompts of 100 to 180 tokens that share their first 64; answers of 3 to 10."""
    rng = random.Random(0)
    shared = tuple(rng.randrange(5, 1000) for _ in range(64))
    own = [tuple(rng.randrange(5, 1000) for _ in range(rng.randrange(36, 116))) for _ in range(8)]
    return [job_of(shared + ids, rng.randrange(3, 11), index) for index, ids in enumerate(own)]


def ran(model, jobs, **rules):
    return Rung(model, NAIVE, [Technique("rules", rules=rules)]).run(jobs)


def at_once(outcomes) -> int:
    """Most requests that were between their first and their last token at one moment."""
    return max(sum(each.first_s <= moment.first_s <= each.last_s for each in outcomes) for moment in outcomes)


def test_a_static_batch_begins_when_the_one_before_has_ended(model, jobs):
    outcomes = ran(model, jobs).outcomes
    batches = [outcomes[begin : begin + RESERVED] for begin in range(0, len(outcomes), RESERVED)]
    for before, after in zip(batches, batches[1:]):
        assert max(each.last_s for each in before) <= min(each.first_s for each in after)
    assert at_once(ran(model, jobs, continuous=True).outcomes) <= RESERVED


def test_a_place_for_the_longest_answer_holds_more_than_is_used(model, jobs):
    reserved = ran(model, jobs, continuous=True)
    paged = ran(model, jobs, continuous=True, paged=True)
    assert reserved.kv_use < 0.4 and paged.kv_use > 0.9
    assert at_once(paged.outcomes) > RESERVED


def test_named_spans_are_found_again(model, jobs):
    named = ran(model, jobs, continuous=True, paged=True, named=True)
    assert max(each.num_cached for each in named.outcomes) == 64
    assert not any(each.num_cached for each in ran(model, jobs, paged=True).outcomes)


def test_no_rule_changes_an_answer(model, jobs):
    answers = [
        [each.token_ids for each in ran(model, jobs, **dict.fromkeys(rules, True)).outcomes]
        for rules in ((), ("continuous",), ("paged",), ("continuous", "paged", "named"))
    ]
    assert all(each == answers[0] for each in answers)
    assert [len(ids) for ids in answers[0]] == [job.num_output for job in jobs]


class _AnyOrder:
    """A sender whose later jobs end first."""

    async def open(self, jobs):
        return [Outcome(job.index, 0.0, 1, num_output=job.num_output) for job in reversed(jobs)]

    async def closed(self, jobs, concurrency):
        return await self.open(jobs)


@pytest.mark.parametrize("send", [sending.arriving, lambda sender, jobs: sending.closed(sender, jobs, 2)])
def test_outcomes_of_what_was_sent_are_in_the_order_of_the_jobs(send):
    """Rungs are compared answer by answer, whichever ended first."""
    jobs = [job_of((7, 8), 3, index) for index in range(4)]
    outcomes = asyncio.run(send(_AnyOrder(), jobs))
    assert [each.index for each in outcomes] == [0, 1, 2, 3]


@pytest.mark.parametrize("points", [("p50", "p95", "p99"), ("p50", "max")], ids=" ".join)
def test_rows_become_lines(tmp_path, points):
    def row(name, value, against=None, met=None):
        return {"row": name, "value": value, "ratio": value / against if against else None, "met": met}

    rows = [row("arrivals over naive throughput", 1.0, 2.0)]
    for name, factor in (("naive", 1), ("int8 KV alone", 2), ("all on", 4)):
        rows += [row(f"{name}: {what} {point}", 500 / factor) for what in ("TTFT", "TPOT") for point in points]
        rows += [row(f"{name}: throughput", 2.0 * factor, 2.0, met=True if factor == 4 else None)]
        rows += [row(f"{name}: goodput within ttft=1ms", 1.5), row(f"{name}: {ladder.SAME}", 1.0)]
        rows += [row(f"{name}: bits per byte, recorded", 1.31)]
    rows += [row("naive: KV used over held", 0.07), row("all on: KV used over held", 0.95, met=True)]
    path = tmp_path / "ladder-x.json"
    machine = {"cpu": "some CPU", "cores": 2}
    path.write_text(json.dumps({"command": "c", "date": "d", "machine": machine, "rows": rows}))
    lines = ladder.table(path).splitlines()
    first, alone = lines[:5], lines[-1]
    times = " / ".join(["125"] * len(points))
    assert f"| TTFT {' / '.join(points)}, ms |" in first[0]
    assert first[-1].startswith(f"| all on | 8 (4x), met | {times} | {times} | 1.5 | 0.95, met | 100% |")
    assert alone.startswith("| int8 KV alone | 4 (2x) | 250")
