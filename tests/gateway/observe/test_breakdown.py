"""The phases of a request add up to its whole time, whatever its end; the reply's timing, the root span, the metrics
and the log line say the same; and a failure is on the span that it happened in."""

import asyncio
import logging
import re

import grpc
import pytest

from baton.service.observe import genai_metrics, telemetry
from baton.v1 import worker_pb2
from gateway.api.owned_request import OwnedRequest
from gateway.api.request_handler import CallContext
from gateway.request.timing import PHASES, Measured, Stamps, breakdown, timing
from tests.gateway.calls import PROMPT, generate, hold, holder, read, release, wait_for_gate
from tests.gateway.observe.samples import samples
from tests.support.client import make_request
from tests.support.observe.otlp import Receiver
from tests.support.pace import patience

DURATIONS = ("tokenized", "routed", "granted", "prefill_sent", "first_sent", "second_sent")


@pytest.mark.parametrize("num_reached", range(len(DURATIONS) + 1))
@pytest.mark.parametrize("reported_s", [0.0, 0.3, 1e9])
def test_the_phases_add_up_in_every_ending(num_reached, reported_s):
    """Each stamp is 1 s after the last; a worker's clock may say anything."""
    stamps = Stamps(received=100.0, ended=101.0 + num_reached)
    for index, name in enumerate(DURATIONS[:num_reached]):
        setattr(stamps, name, 101.0 + index)
    report = worker_pb2.DecodeReport(kv_wait_s=reported_s, first_step_s=reported_s)
    measured = Measured(queue_s=reported_s, prefill_s=reported_s, transfer_s=reported_s, decode=report)
    spent = breakdown(stamps, measured)
    assert sum(spent.values()) == pytest.approx(1.0 + num_reached) and min(spent.values()) >= 0
    assert set(spent) <= set(PHASES)
    # What it ended in has the rest: the second after the last stamp.
    last = ("tokenize", "route", "admit", "prefill_queue", "prefill", "decode", "decode")[num_reached]
    assert spent[last] >= 1.0


def test_an_answer_is_told_alike():
    stamps = Stamps(100.0, 100.1, 100.2, 100.4, 100.4, 101.0, 101.3, 103.0, ended=103.0)
    measured = Measured(queue_s=0.1, prefill_s=0.4)
    told, spent = timing(stamps, measured, 5), breakdown(stamps, measured)
    assert [getattr(told, f"{phase}_s") for phase in PHASES[:-1]] == [spent[phase] for phase in PHASES[:-1]]
    assert sum(spent.values()) == pytest.approx(told.total_s)
    assert sum(spent[phase] for phase in PHASES[:6]) == pytest.approx(told.ttft_s)


class Watch:
    """The spans and log lines of requests."""

    def __init__(self, receiver: Receiver, caplog):
        self.receiver, self._caplog = receiver, caplog

    def spans(self) -> dict:
        """Return the spans of the one trace there is; the root by that name."""
        assert telemetry.flush()
        spans = self.receiver.wait_for(lambda spans: any(not span.parent_id for span in spans))
        return {span.name if span.parent_id else "root": span for span in spans}

    def line(self) -> dict[str, str]:
        """Return the log line of the last request."""
        texts = [record.getMessage() for record in self._caplog.records]
        text = next(text for text in reversed(texts) if text.startswith("request ended "))
        return dict(re.findall(r"(\w+)=(\S+)", text))


@pytest.fixture
def watch(caplog):
    with Receiver() as receiver:
        telemetry.setup("baton-gateway", receiver.endpoint)
        genai_metrics.setup("baton-gateway", receiver.endpoint)
        caplog.set_level(logging.INFO)
        yield Watch(receiver, caplog)
        telemetry.shut_down()
        genai_metrics.shut_down()


def agree(c, watch, client_s: float, outcome: str) -> dict:
    """Span, metrics and log line of the only request; returns the spans."""
    spans, seen, line = watch.spans(), samples(c.gateway.meters), watch.line()
    root = spans["root"]
    told = {name: value for name, value in root.attributes.items() if name.startswith("baton.phase.")}
    spent = {name.removeprefix("baton.phase.").removesuffix("_s"): value for name, value in told.items()}
    assert sum(spent.values()) == pytest.approx(root.duration_s, abs=1e-5)
    assert sum(spent.values()) <= client_s  # the client's time has the gateway's within it
    for phase, value in spent.items():
        assert seen["baton_phase_seconds_sum", phase] == pytest.approx(value)
        assert float(line[f"{phase}_ms"]) == pytest.approx(1e3 * value, abs=0.006)
    assert line.keys() & {f"{phase}_ms" for phase in PHASES} == {f"{phase}_ms" for phase in spent}
    assert line["outcome"] == outcome and line["trace_id"] == root.trace_id
    assert sum(seen["baton_requests_total", *key[1:]] for key in seen if key[0] == "baton_requests_total") == 1
    return spans


async def timed(call) -> tuple[float, object]:
    begun = asyncio.get_running_loop().time()
    try:
        result = await call
    except (grpc.aio.AioRpcError, asyncio.CancelledError) as error:
        result = error
    return asyncio.get_running_loop().time() - begun, result


@pytest.mark.parametrize("max_tokens", [1, 2, 20])
async def test_the_phases_of_a_finished_request_add_up(cluster, watch, max_tokens):
    async with cluster() as c:
        client_s, messages = await timed(generate(c, max_tokens=max_tokens))
        await c.idle()
        spans, told = agree(c, watch, client_s, "ok"), messages[-1].timing
        root = spans["root"]
        assert sum(getattr(told, f"{phase}_s") for phase in PHASES[:-1]) <= told.total_s + 1e-9
        assert root.attributes["baton.ttft_s"] == pytest.approx(told.ttft_s)
        assert root.duration_s == pytest.approx(told.total_s, abs=1e-5)
        assert not any(span.is_error for span in spans.values()) and set(spans) == {"root", "route", "admit"}
        genai_metrics.shut_down()
        points = {point.name.removeprefix("gen_ai.server."): point for point in watch.receiver.metrics.points}
        assert points["request.duration"].sum == pytest.approx(told.total_s)
        assert points["time_to_first_token"].sum == pytest.approx(told.ttft_s)
        assert ("time_per_output_token" in points) == (max_tokens > 1)
        assert {point.unit for point in points.values()} == {"s"} and points["request.duration"].bounds[0] == 0.01
        assert points["request.duration"].attributes["gen_ai.request.model"] == "fake"


@pytest.mark.parametrize(
    "gate, span", [("admit", "admit"), ("accept", None), ("prefill", None), ("fetch", None), ("decode", None)]
)
async def test_a_client_that_goes_has_the_spans_up_to_then(cluster, watch, gate, span):
    """From `accept` on a worker has the request, and its span: the gateway draws none in its place."""
    async with cluster() as c:
        hold(c, gate)
        begun = asyncio.get_running_loop().time()
        call = c.stub.Generate(make_request(PROMPT, max_tokens=6), timeout=patience(20))
        await wait_for_gate(c, gate)
        call.cancel()
        await c.until(lambda: c.gateway.handler.num_running == 0)
        release(c, gate)
        await c.idle()
        spans = agree(c, watch, asyncio.get_running_loop().time() - begun, "cancelled")
        assert {name for name, each in spans.items() if each.status == "cancelled"} == {"root", span} - {None}


async def test_refused_for_want_of_room(cluster, watch):
    async with cluster(max_queue_wait_s=0.15) as c:
        c.decode[0].refusals += ["kv_full"] * 50
        client_s, error = await timed(generate(c, max_tokens=2))
        assert error.code() == grpc.StatusCode.RESOURCE_EXHAUSTED
        spans = agree(c, watch, client_s, "refused")
        assert spans["admit"].is_error and spans["admit"].attributes["error.type"] == "QUEUE_WAIT"
        assert not spans["route"].is_error
        retries = [told for name, told in spans["root"].events if name == "retry"]
        assert retries and {told["baton.reason"] for told in retries} == {"kv_full"}
        assert spans["root"].attributes["baton.phase"] == "awaiting credit"


async def test_refused_at_the_door(cluster, watch):
    async with cluster() as c:
        client_s, error = await timed(generate(c, max_tokens=2, top_p=7.0))
        assert error.code() == grpc.StatusCode.INVALID_ARGUMENT
        assert set(agree(c, watch, client_s, "refused")) == {"root"}


async def test_no_prefill_worker_has_room(cluster, watch):
    async with cluster(max_queue_wait_s=0.15) as c:
        c.prefill[0].refusals += ["queue_full"] * 50
        client_s, _ = await timed(generate(c, max_tokens=2))
        spans = agree(c, watch, client_s, "refused")
        assert spans["prefill.wait"].is_error and not spans["admit"].is_error


@pytest.mark.parametrize("gate", ["admit", "accept", "prefill", "fetch", "decode"])
async def test_the_deadline_passes(cluster, watch, gate):
    async with cluster(default_timeout_s=1.0) as c:
        hold(c, gate)
        client_s, _ = await timed(read(c.stub.Generate(make_request(PROMPT, max_tokens=6))))
        spans = agree(c, watch, client_s, "failed")
        assert spans["root"].attributes["error.type"] == "DEADLINE_EXCEEDED" and not spans["route"].is_error
        assert spans["admit"].is_error == (gate == "admit")
        release(c, gate)
        await c.idle()


@pytest.mark.parametrize(
    "has_deadline, left_s, outcome",
    [(True, 0.9, "failed"), (True, -0.01, "failed"), (True, 30.0, "cancelled"), (False, 0.9, "cancelled")],
)
async def test_a_deadline_is_one_whoever_sees_it_pass(cluster, watch, has_deadline, left_s, outcome):
    """A client ends its call at its own deadline, of which gRPC has told the gateway a hundredth more at most."""

    async def emit(message) -> None:
        pass

    async with cluster() as c:
        hold(c, "decode")
        call = CallContext(100.0, has_deadline=has_deadline)
        owned = OwnedRequest(make_request(PROMPT, max_tokens=6))
        task = asyncio.create_task(c.gateway.handler.generate(owned, call, emit))
        await wait_for_gate(c, "decode")
        (record,) = c.gateway.recent._running.values()
        record.stamps.received -= 100.0 - left_s
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        await c.idle()
        root = agree(c, watch, 200.0, outcome)["root"]
        reason = "DEADLINE_EXCEEDED" if outcome == "failed" else None
        assert (root.is_error, root.attributes.get("error.type")) == (reason is not None, reason)


@pytest.mark.parametrize(
    "gate, role, name",
    [
        ("admit", "decode", "admit"),
        ("accept", "prefill", "prefill"),
        ("prefill", "decode", "kv.transfer"),
        ("decode", "decode", "decode"),
    ],
)
async def test_the_worker_dies(cluster, watch, gate, role, name):
    """No worker takes over: the phase has the failure, drawn by the gateway, which saw it."""
    async with cluster(max_start_wait_s=0) as c:
        hold(c, gate)
        running = asyncio.create_task(timed(generate(c, max_tokens=6)))
        await wait_for_gate(c, gate)
        if gate == "prefill":
            await c.until(lambda: "fetch" in c.decode[0].kinds())
        dead = holder(c, role)
        await dead.stop()
        c.workers.remove(dead)
        client_s, _ = await running
        spans = agree(c, watch, client_s, "failed")
        assert spans[name].is_error and spans["root"].is_error and not spans["route"].is_error
        reason = f"{role.upper()}_WORKER_LOST"
        assert spans[name].attributes["error.type"] == spans["root"].attributes["error.type"] == reason
        assert not spans["root"].events
        release(c, gate)
        await c.idle()


async def test_another_worker_takes_over(cluster, watch):
    async with cluster(num_decode=2) as c:
        hold(c, "decode")
        running = asyncio.create_task(timed(generate(c, max_tokens=6)))
        await wait_for_gate(c, "decode")
        dead = holder(c, "decode")
        await dead.stop()
        c.workers.remove(dead)
        release(c, "decode")
        client_s, messages = await running
        await c.idle()
        spans = agree(c, watch, client_s, "ok")
        assert spans["root"].duration_s == pytest.approx(messages[-1].timing.total_s, abs=1e-5)
        ((name, told),) = spans["root"].events
        assert (name, told["baton.reason"], told["baton.phase"]) == ("migration", "DECODE_WORKER_LOST", "decoding")
        assert told["baton.worker"] == spans["decode"].attributes["baton.worker"] == dead.instance.hex()[:8]
        assert spans["decode"].is_error and not spans["root"].is_error


async def test_a_share_of_the_traces(cluster, watch):
    """Head sampling: the gateway decides for traces that begin with it, and follows the client for others."""
    async with cluster(trace_sample=0.0) as c:
        await generate(c, max_tokens=2)
        sampled = (("traceparent", f"00-{'a' * 32}-{'b' * 16}-01"),)
        await read(c.stub.Generate(make_request(PROMPT, max_tokens=2), metadata=sampled, timeout=patience(20)))
        await c.idle()
        assert telemetry.flush()
        spans = watch.receiver.wait_for(lambda spans: len(spans) >= 3)
        assert {span.trace_id for span in spans} == {"a" * 32}
