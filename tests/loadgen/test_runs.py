"""Runs against a stub gateway: every job once, latencies from the intended time, and a late sender is not valid."""

import csv
import io
import math
import re
import time

import pytest

from baton.loadgen.bottleneck import name_bottleneck
from baton.loadgen.outcome import Outcome
from baton.loadgen.plan import RunPlan
from baton.loadgen.report import page
from baton.loadgen.run import Ran, run_jobs
from baton.loadgen.summary import percentile, summarize, table
from baton.loadgen.workload import Job
from baton.service.observe.bottleneck import BOTTLENECKS, LEVERS
from baton.service.slo import Slo
from tests.support.gateway.fake_gateway import FakeGateway, serving_gateway


def jobs(num: int, gap_s: float = 0.01, num_output: int = 3) -> list[Job]:
    return [Job(index, index * gap_s, 20, num_output) for index in range(num)]


@pytest.mark.parametrize("num_processes, concurrency", [(1, None), (1, 4), (2, None), (2, 3)])
def test_every_job_is_sent_once_and_told(num_processes, concurrency):
    stub, told = FakeGateway(), []
    with serving_gateway(stub) as target:
        ran = run_jobs(RunPlan(target, 1000, concurrency, num_processes), jobs(12), told.append)
    assert [outcome.index for outcome in ran.outcomes] == list(range(12)) and len(told) == 12
    assert {outcome.latencies for outcome in ran.outcomes} == set(told)
    assert len(set(stub.prompts)) == 12 and {len(prompt) for prompt in stub.prompts} == {20}
    for outcome in ran.outcomes:
        assert outcome.ok and outcome.num_output == 3 and outcome.num_messages == 3 and outcome.num_cached == 8
        assert 0 <= outcome.intended_s <= outcome.sent_s <= outcome.first_s <= outcome.last_s <= ran.duration_s


def test_an_open_loop_does_not_wait_for_answers():
    with serving_gateway(FakeGateway(delay_s=1.0)) as target:
        ran = run_jobs(RunPlan(target, 1000), jobs(10, num_output=1))
    assert max(outcome.sent_s for outcome in ran.outcomes) < min(outcome.first_s for outcome in ran.outcomes)


def test_a_closed_loop_keeps_its_number():
    with serving_gateway(FakeGateway(delay_s=0.05)) as target:
        ran = run_jobs(RunPlan(target, 1000, concurrency=2), jobs(8, num_output=1))
    for outcome in ran.outcomes:
        at_once = [o for o in ran.outcomes if o.sent_s < outcome.last_s and o.last_s > outcome.sent_s]
        assert len([o for o in at_once if o.sent_s <= outcome.sent_s]) <= 2


def test_refusals_are_outcomes():
    with serving_gateway(FakeGateway(refuse_every=3)) as target:
        ran = run_jobs(RunPlan(target, 1000), jobs(9))
    summary = summarize(ran, Slo(), is_open=True)
    assert summary["statuses"] == {"OK": 6, "RESOURCE_EXHAUSTED": 3}
    assert summary["num_answered"] == 6 and summary["slo_met_share"] == pytest.approx(6 / 9)


def test_a_late_sender_is_not_valid(monkeypatch):
    from baton.loadgen import client

    real = client.Sender._request

    def slow(self, job):
        time.sleep(0.05)
        return real(self, job)

    monkeypatch.setattr(client.Sender, "_request", slow)
    with serving_gateway(FakeGateway()) as target:
        ran = run_jobs(RunPlan(target, 1000), jobs(8, gap_s=0.001))
    summary = summarize(ran, Slo(), is_open=True)
    assert not summary["valid"] and summary["bound"]["name"] == "client"
    # What the sender lost counts: latency is from the intended time.
    assert ran.outcomes[-1].ttft_s > 0.3


def outcome(index: int = 0, ttft_s: float = 0.1, num_output: int = 11, step_s: float = 0.02, **phases) -> Outcome:
    last = ttft_s + (num_output - 1) * step_s
    return Outcome(
        index, 0.0, 64, 0.0, ttft_s, last, num_output, 0, num_output, step_s,
        phases_s={f: phases.get(f, 0.0) for f in ("admit", "prefill_queue", "prefill", "kv_wait", "decode_queue", "first_step")},
    )  # fmt: skip


@pytest.mark.parametrize("name", BOTTLENECKS)
def test_the_sentence_names_what_bounds_the_run(name):
    least = outcome()
    least.bound_s = {each: 2.0 if each == name else 1.0 for each in BOTTLENECKS}
    bound = name_bottleneck([least] * 5, 0.2, 0.0)
    assert bound.name == name and LEVERS[name] in bound.sentence and "18%" in bound.sentence


def test_long_prompts_are_named():
    one = outcome()
    one.num_prompt, one.num_cached, one.bound_s = 3000, 500, {"prefill compute": 1.0}
    assert "2,500 tokens each are in no cache" in name_bottleneck([one], 0.2, 0.0).sentence


def test_the_sentence_names_the_client():
    for arguments in ((0.97, 0.0), (0.2, 0.05)):
        assert name_bottleneck([outcome()], *arguments).name == "client"
    assert name_bottleneck([], 0.1, 0.0).name == "nothing"


def test_percentiles_are_interpolated():
    values = [5.0, 1.0, 3.0, 2.0, 4.0]
    assert percentile(values, 50) == 3 and percentile(values, 100) == 5 and percentile(values, 75) == 4
    assert math.isnan(percentile([], 50))


def summary_of(outcomes, slo: Slo = Slo(0.15, 0.05)) -> dict:
    facts = {"workload": "test <b>", "target": "t", "model": "m", "date": "d"}
    facts |= {"shape": "8 requests", "host": "a host", "versions": "v"}
    return facts | summarize(Ran(outcomes, 4.0, 0.1), slo, is_open=True)


def test_goodput_counts_what_met_the_objective():
    outcomes = [outcome(0), outcome(1, ttft_s=0.2), outcome(2, step_s=0.06), outcome(3, num_output=1)]
    summary = summary_of(outcomes)
    assert summary["goodput_per_s"] == pytest.approx(2 / 4.0) and summary["slo_met_share"] == 0.5
    assert summary["output_tokens_per_s"] == pytest.approx(34 / 4.0)


def test_the_table_has_a_line_a_request():
    rows = list(csv.DictReader(io.StringIO(table([outcome(0, prefill=0.5), outcome(1, num_output=1)]))))
    assert [row["index"] for row in rows] == ["0", "1"]
    assert float(rows[0]["prefill_s"]) == 0.5 and rows[1]["tpot_s"] == "" and rows[1]["transfer_s"] == ""


def test_the_page_needs_nothing_beside_it():
    steps = [
        {"rate": 1.0, "goodput_per_s": 1.0, "requests_per_s": 1.0},
        {"rate": 2.0, "goodput_per_s": 1.5, "requests_per_s": 2.0},
    ]
    outcomes = [outcome(index, prefill=0.05) for index in range(20)]
    text = page(summary_of(outcomes), outcomes, steps)
    assert not re.search(r"(src|href)=|<script|@import|url\(", text)
    assert "test &lt;b&gt;" in text and text.count("<svg") == 5
    assert "nothing to show" in page(summary_of([]), [], [])


@pytest.mark.parametrize("slo", [Slo(e2e_s=1800), Slo(ttft_s=1800, tpot_s=1e-8)])
def test_the_page_of_an_objective_of_minutes_is_written(slo):
    outcomes = [outcome()]
    assert str(slo) in page(summary_of(outcomes, slo), outcomes, [])
