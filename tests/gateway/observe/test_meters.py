"""Counters of the gateway for every ending of a request; and its page as Prometheus reads it."""

import asyncio
from collections import Counter
from types import SimpleNamespace

import pytest
from prometheus_client.openmetrics.parser import text_string_to_metric_families as openmetrics
from prometheus_client.parser import text_string_to_metric_families as classic

from baton.service.errors import (
    Cancelled,
    FailedPrecondition,
    Internal,
    InvalidRequest,
    Overloaded,
    Unavailable,
    from_code,
)
from baton.service.observe.process_gauges import process_gauges
from baton.service.observe.telemetry import TraceContext
from baton.service.settings import SettingsError
from baton.service.slo import Slo
from baton.v1 import fleet_pb2
from gateway.config.served_model import ServedModel
from gateway.config.slo_classes import BUILT_IN, read_classes
from gateway.model.model_folder import Defaults
from gateway.observe.access_log import line
from gateway.observe.gauges import denied_count, fleet_gauges, request_gauges
from gateway.observe.meters import GatewayMeters, outcome
from gateway.observe.predictions import predictions
from gateway.observe.recent_requests import RecentRequests
from gateway.request.timing import PHASES, Measured, breakdown, timing
from gateway.request.validation import validate
from gateway.routing.routing import Decision
from tests.gateway.observe.samples import samples
from tests.support.client import make_request
from tests.support.gateway.request_records import ANSWERED, record


@pytest.fixture
def meters():
    return GatewayMeters("tiny", BUILT_IN)


def test_an_answered_request_is_counted_as_its_timing_says(meters):
    answered = record(**ANSWERED)
    answered.measured = Measured(queue_s=0.1, prefill_s=0.4)
    meters.ended(answered, None)
    seen = samples(meters)
    assert seen["baton_requests_total", "ok", ""] == 1
    assert (seen["baton_tokens_total", "input"], seen["baton_tokens_total", "cached"]) == (12, 4)
    assert seen["baton_tokens_total", "output"] == 5
    told = timing(answered.stamps, answered.measured, 5)
    assert seen["baton_ttft_seconds_sum",] == pytest.approx(told.ttft_s)
    assert seen["baton_tpot_seconds_sum",] == pytest.approx(told.tpot_s)
    assert seen["baton_e2e_seconds_sum",] == pytest.approx(2.0)
    phases = {phase: seen["baton_phase_seconds_sum", phase] for phase in PHASES}
    assert phases == pytest.approx(breakdown(answered.stamps, answered.measured))
    assert {phase: phases[phase] for phase in PHASES[:-1]} == pytest.approx(
        {phase: getattr(told, f"{phase}_s") for phase in PHASES[:-1]}
    )
    # Nothing is left out and nothing counted twice.
    assert sum(phases.values()) == pytest.approx(2.0)


@pytest.mark.parametrize(
    "stamps, num_output, num_repeated, expected",
    [
        ({}, 0, None, (0, 0, 0)),  # refused, or not come to a worker
        ({}, 3, None, (12, 4, 3)),  # ended before its client got anything
        (ANSWERED, 0, None, (12, 4, 0)),  # a prompt that is read alone
        (ANSWERED, 5, None, (12, 4, 5)),  # also of a client that resumes, where no worker had the sequence
        (ANSWERED, 5, 0, (0, 0, 5)),
        (ANSWERED, 5, 3, (0, 0, 2)),  # the first 3, and the prompt, were counted with the stream that broke off
        ({}, 0, 3, (0, 0, 0)),
    ],
)
def test_tokens_are_those_that_were_read_and_written(meters, stamps, num_output, num_repeated, expected):
    ended, recent = record(**stamps), RecentRequests()
    ended.num_output_tokens, ended.num_repeated_tokens = num_output, num_repeated
    request = make_request([1, 2], max_tokens=8, temperature=0.0, request_id="a", resume_from=(3,))
    ended.validated = validate(request, ServedModel("tiny", 1024, 400, frozenset((0,)), Defaults()))
    recent.began(ended)
    meters.ended(ended, Unavailable("gone", reason="DECODE_WORKER_LOST"))
    recent.ended(ended, None)
    seen, kinds = samples(meters), ("input", "cached", "output")
    assert tuple(seen["baton_tokens_total", kind] for kind in kinds) == expected
    assert tuple(seen["baton_tenant_tokens_total", kind, "default"] for kind in kinds) == expected
    listed = recent.listed(fleet_pb2.ListRequestsRequest(), num_waiting=0)
    assert (listed.num_input_tokens, listed.num_output_tokens) == (12, num_output)  # how long the answer was


@pytest.mark.parametrize(
    "error, expected",
    [
        (None, ("ok", "")),
        (Cancelled("gone"), ("cancelled", "CANCELLED")),
        (asyncio.CancelledError(), ("cancelled", "CANCELLED")),
        (Overloaded("full", 1.0, reason="QUEUE_WAIT"), ("refused", "QUEUE_WAIT")),
        (InvalidRequest("prompt", "too long"), ("refused", InvalidRequest("prompt", "x").reason)),
        (Unavailable("none", reason="NO_WORKER"), ("failed", "NO_WORKER")),
        (FailedPrecondition("no chat template"), ("refused", "FAILED_PRECONDITION")),  # a score of a model without one
        (from_code(9, "workers disagree", reason="TICKET_REFUSED"), ("failed", "TICKET_REFUSED")),
        (Internal("oops"), ("failed", Internal("oops").reason)),
        (RuntimeError("bug"), ("failed", "INTERNAL")),
    ],
)
def test_every_ending_has_an_outcome(meters, error, expected):
    assert outcome(error) == expected
    meters.ended(record(), error)
    assert samples(meters)["baton_requests_total", *expected] == 1


def test_calls_that_the_guard_turned_away():
    """A scrape reads what the guard has counted until then."""
    num_denied = Counter()
    meters = GatewayMeters("tiny", BUILT_IN, [denied_count(num_denied)])
    assert not any(name == "baton_denied_total" for name, *_ in samples(meters))
    num_denied["/baton.v1.Fleet/ListWorkers", "PERMISSION_DENIED"] += 1
    num_denied["other", "PERMISSION_DENIED"] += 2
    seen = samples(meters)
    assert seen["baton_denied_total", "/baton.v1.Fleet/ListWorkers", "PERMISSION_DENIED"] == 1
    assert seen["baton_denied_total", "other", "PERMISSION_DENIED"] == 2


def test_a_refused_request_leaves_the_latencies_alone(meters):
    meters.ended(record(), Overloaded("full", 1.0))
    seen = samples(meters)
    assert seen["baton_ttft_seconds_count",] == seen["baton_e2e_seconds_count",] == 0


def test_attempts_after_the_first_are_migrations(meters):
    moved = record(**ANSWERED)
    moved.num_attempts = 3
    meters.ended(moved, None)
    assert samples(meters)["baton_migrations_total",] == 2


def test_gauges_are_read_at_the_scrape():
    recent, waiting = RecentRequests(), []
    version = SimpleNamespace(name="tiny", pipeline=SimpleNamespace(queues=waiting))
    catalog = SimpleNamespace(versions=[version])
    meters = GatewayMeters("tiny", BUILT_IN, request_gauges(recent, catalog))
    recent.began(record())
    waiting += [record(), record()]
    seen = samples(meters)
    assert (seen["baton_requests_running",], seen["baton_requests_waiting",]) == (1, 2)


def test_whether_requests_of_a_model_can_be_served():
    """By a version of it that is not retired: one that was removed ends what it has, and is asked no more."""
    fleets = [
        SimpleNamespace(name=name, is_retired=is_retired, not_ready=lambda reason=reason: reason)
        for name, is_retired, reason in (
            ("a", True, "no decode worker serves"), ("a", False, None), ("b", False, "no decode worker serves"),
            ("b", True, None), ("gone", True, "no decode worker serves"),
        )
    ]  # fmt: skip
    (gauge,) = (
        each for each in fleet_gauges(SimpleNamespace(fleets=fleets), SimpleNamespace()) if each.name == "baton_ready"
    )
    assert gauge.read() == {"a": 1, "b": 0}
    fleets[2].not_ready = lambda: None
    assert gauge.read() == {"a": 1, "b": 1}


def test_each_model_has_its_own_counts():
    """The families are one; what belongs to no model is under no name where there are several."""
    meters = GatewayMeters("", BUILT_IN, process_gauges(None))
    for name, num in (("a", 2), ("b", 1)):
        for _ in range(num):
            ended = record(**ANSWERED)
            ended.model = name
            meters.ended(ended, None)
            meters.itl_recorder_for(ended)(0.1)
    text = meters.exposition().body.decode()
    found = {
        (sample.name, sample.labels["model_name"]): sample.value
        for family in classic(text)
        for sample in family.samples
        if sample.name in ("baton_requests_total", "baton_itl_seconds_count", "baton_tasks")
    }
    assert found == {
        ("baton_requests_total", "a"): 2, ("baton_requests_total", "b"): 1,
        ("baton_itl_seconds_count", ""): 0, ("baton_itl_seconds_count", "a"): 2, ("baton_itl_seconds_count", "b"): 1,
        ("baton_tasks", ""): 0,
    }  # fmt: skip


def test_predictions_are_held_against_what_was(meters):
    """0.8 s to the first token and 1.8 s to the last of 5, from the decision on."""
    answered = record(**ANSWERED)
    answered.decision = Decision("p", "d", "long_prompt", ttft_s=0.4, tpot_s=0.8)
    assert predictions(answered) == [
        ("ttft", 0.4, pytest.approx(0.8)),
        ("total", pytest.approx(3.6), pytest.approx(1.8)),
    ]
    meters.ended(answered, None)
    seen = samples(meters)
    assert seen["baton_route_prediction_ratio_sum", "ttft"] == pytest.approx(0.5)
    assert seen["baton_route_prediction_ratio_sum", "total"] == pytest.approx(2.0)
    told = line(answered, None)
    assert (told["route_predicted_ms"], told["route_taken_ms"]) == (3600, 1800)
    answered.num_attempts = 2
    assert predictions(answered) == [] and line(answered, None)["route_taken_ms"] == "-", "nobody foresaw that"


def test_exemplars_lead_to_the_trace(meters):
    meters.ended(record(**ANSWERED), None)
    meters.itl_recorder_for(record())(0.02)
    reply = meters.exposition(is_openmetrics=True)
    assert "openmetrics" in reply.headers["content-type"]
    exemplars = {
        sample.name: sample.exemplar.labels
        for family in openmetrics(reply.body.decode())
        for sample in family.samples
        if sample.exemplar
    }
    for name in ("baton_ttft_seconds_bucket", "baton_itl_seconds_bucket", "baton_e2e_seconds_bucket"):
        assert exemplars[name] == {"trace_id": f"{7:032x}"}


def test_what_is_not_sampled_has_no_exemplar(meters):
    unsampled = record(**ANSWERED)
    unsampled.context = TraceContext(7, 8, sampled=False)
    meters.ended(unsampled, None)
    reply = meters.exposition(is_openmetrics=True)
    assert b"trace_id" not in reply.body


@pytest.mark.parametrize(
    "slo_class, error, counted, met",
    [
        ("standard", None, 1, 1),
        ("interactive", None, 1, 0),
        ("batch", None, 1, 1),
        ("standard", Overloaded("full", 1.0), 1, 0),
        ("standard", Overloaded("more than its quota", 1.0, reason="TENANT_TOKENS"), 0, 0),
        ("standard", Overloaded("more than its quota", 1.0, reason="TENANT_REQUESTS"), 0, 0),
        ("standard", Overloaded("unread", 0.0, reason="SLOW_READER"), 0, 0),
        ("standard", Unavailable("none", reason="NO_WORKER"), 1, 0),
        ("standard", InvalidRequest("prompt", "too long"), 0, 0),
        ("standard", Cancelled("gone"), 0, 0),
    ],
)
def test_service_levels(meters, slo_class, error, counted, met):
    """The record has a TTFT of 1.0 s and a TPOT of 50 ms: beyond interactive, within standard."""
    quick = record(**{**ANSWERED, "last_sent": 101.2, "second_sent": 101.1})
    quick.validated = SimpleNamespace(slo_class=slo_class, resume_from=())
    meters.ended(quick, error)
    seen = samples(meters)
    assert (seen["baton_slo_requests_total", slo_class], seen["baton_slo_met_total", slo_class]) == (counted, met)


@pytest.mark.parametrize("operation", ["embeddings", "rerank"])
@pytest.mark.parametrize("slo, missed", [(Slo(ttft_s=0.1), []), (Slo(ttft_s=0.1, e2e_s=0.9), ["e2e"])])
def test_prompts_that_are_read_alone_have_a_duration_and_no_first_token(operation, slo, missed, monkeypatch):
    told = []
    monkeypatch.setattr("gateway.observe.meters.genai_metrics.observe", lambda *values: told.append(values))
    meters = GatewayMeters("tiny", {"standard": slo})
    read = record(**{**ANSWERED, "second_sent": None, "last_sent": 101.0})
    read.operation, read.num_output_tokens, read.num_longest_output = operation, 0, 0
    read.stamps.ended, read.validated = 101.0, SimpleNamespace(slo_class="standard", request_id="a", resume_from=())
    meters.ended(read, None)
    seen = samples(meters)
    assert (seen["baton_ttft_seconds_count",], seen["baton_e2e_seconds_sum",]) == (0, 1.0)
    assert [each for each in ("ttft", "e2e") if seen["baton_slo_missed_total", "standard", each]] == missed
    assert told == [(operation, "tiny", 1.0, None, None, None)]
    assert (line(read, None)["ttft_ms"], line(read, None)["total_ms"]) == (0.0, 1000.0)


def test_a_file_of_service_levels(tmp_path):
    path = tmp_path / "slo.toml"
    path.write_text('standard = "ttft=2s"\nbulk = ""\n')
    assert read_classes(path) == {"standard": Slo(ttft_s=2.0), "bulk": Slo()}
    for text in ("", "fast = 'ttft=1s'", "standard = 'soon'", "standard = 3", "not toml"):
        path.write_text(text)
        with pytest.raises(SettingsError, match=f"--slo-classes {path}"):
            read_classes(path)
