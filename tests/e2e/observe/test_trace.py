"""One whole trace a request across the three processes, however it ended, received by a real OTLP receiver."""

import re
import time
from urllib.request import urlopen

import grpc
import pytest

from gateway.request.timing import PHASES
from tests.support.client import Client, make_request, read_error
from tests.support.observe.otlp import Span
from tests.support.observe.traced import PARENTS, Traced
from tests.support.stack import SLOW_STEPS

LONG = {"temperature": 0.0, "max_tokens": 500, "ignore_eos": True}


@pytest.fixture
def traced(receiver):
    return Traced(receiver)


def test_a_finished_request_has_one_tree_of_spans_over_all_processes(stack, client, traced, prompts):
    reply = client.generate(prompts(200), metadata=traced.metadata, temperature=0.0, max_tokens=8, ignore_eos=True)
    spans = traced.whole(*PARENTS)
    root, timing = spans["root"], reply.timing
    assert root.name == f"text_completion {stack.model.name}" and root.kind == "server" and root.status == "ok"
    assert len(traced.receiver.trace(traced.trace_id)) == 1 + len(PARENTS)

    pids = {name: span.pid for name, span in spans.items()}
    assert pids["root"] == pids["route"] == pids["admit"] == stack.gateways[0].pid
    assert pids["prefill"] == pids["prefill.queue"] == pids["prefill.compute"] == stack.prefill[0].pid
    assert pids["kv.transfer"] == pids["decode"] == pids["decode.steps"] == stack.decode[0].pid

    near = {"rel": 0, "abs": 0.002}
    assert spans["admit"].duration_s == pytest.approx(timing.admit_s, **near)
    assert spans["prefill.queue"].duration_s == pytest.approx(timing.prefill_queue_s, **near)
    assert spans["prefill.compute"].duration_s == pytest.approx(timing.prefill_s, **near)
    assert root.duration_s == pytest.approx(timing.total_s, rel=0, abs=0.02)
    for parent, first, second in (("prefill", "queue", "compute"), ("decode", "queue", "steps")):
        halves = spans[f"{parent}.{first}"], spans[f"{parent}.{second}"]
        assert sum(half.duration_s for half in halves) == pytest.approx(spans[parent].duration_s, **near)

    assert spans["kv.transfer"].links == (spans["prefill"].span_id,)
    assert spans["route"].attributes["baton.route.reason"] == "forced"
    assert spans["route"].attributes["baton.route.alternative"].endswith(" alone")
    told = {phase: root.attributes[f"baton.phase.{phase}_s"] for phase in PHASES}
    assert sum(told.values()) == pytest.approx(timing.total_s, rel=1e-6)
    assert {phase: told[phase] for phase in PHASES[:-1]} == pytest.approx(
        {phase: getattr(timing, f"{phase}_s") for phase in PHASES[:-1]}
    )

    assert root.attributes["gen_ai.operation.name"] == "text_completion"
    assert root.attributes["gen_ai.request.model"] == stack.model.name
    assert root.attributes["gen_ai.usage.input_tokens"] == 200
    assert root.attributes["gen_ai.usage.output_tokens"] == 8


def test_the_root_of_a_chat_is_named_chat(stack, client, traced):
    client.generate([("user", "hello")], metadata=traced.metadata, temperature=0.0, max_tokens=2, ignore_eos=True)
    assert traced.whole()["root"].name == f"chat {stack.model.name}"


def test_without_a_traceparent_the_request_is_a_trace_of_its_own(client, receiver, prompts):
    begun_ns = time.time_ns()  # spans of requests before it may arrive meanwhile
    replies = [client.generate(prompts(70), temperature=0.0, max_tokens=2, ignore_eos=True) for _ in range(2)]
    assert len(replies) == 2

    def roots(spans):
        return [span for span in spans if not span.parent_id and span.start_ns >= begun_ns]

    spans = receiver.wait_for(lambda spans: len(roots(spans)) >= 2)
    assert len({span.trace_id for span in roots(spans)}) == len(roots(spans)) == 2


def test_many_at_once_do_not_mix(client, receiver, prompts):
    many = [Traced(receiver) for _ in range(6)]
    calls = [client.stream(prompts(130), metadata=each.metadata, **{**LONG, "max_tokens": 6}) for each in many]
    for call in calls:
        list(call)
    for each in many:
        each.whole(*PARENTS)
        assert len(receiver.trace(each.trace_id)) == 1 + len(PARENTS)


def test_cancelled_in_decode(client, traced, prompts, slow):
    call = client.stream(prompts(200), metadata=traced.metadata, **LONG)
    for _ in range(3):
        next(call)
    call.cancel()
    spans = traced.whole(*PARENTS)
    assert spans["root"].status == "cancelled" and not spans["root"].is_error
    assert spans["decode"].status == "cancelled"


def test_cancelled_early(client, receiver, prompts, slow):
    """The phase that each is caught in depends on the machine: whatever was begun is drawn, in one tree."""
    many = [Traced(receiver) for _ in range(6)]
    for each, delay_s in zip(many, (0.002, 0.005, 0.01, 0.02, 0.05, None), strict=True):
        call = client.stream(prompts(900), metadata=each.metadata, **{**LONG, "max_tokens": 100})
        time.sleep(delay_s) if delay_s else next(call)
        call.cancel()
    last = Traced(receiver)
    client.generate(prompts(100), metadata=last.metadata, **{**LONG, "max_tokens": 4})
    last.whole(*PARENTS)  # what the gateway drew before has arrived too
    begun = [each for each in many if receiver.trace(each.trace_id)]  # others were cancelled before they had left
    assert many[-1] in begun
    assert {each.whole()["root"].status for each in begun} == {"cancelled"}


def test_an_invalid_request_has_a_root_and_no_more(client, traced):
    with pytest.raises(grpc.RpcError):
        client.generate([5, 6], metadata=traced.metadata, top_p=7.0)
    spans = traced.whole()
    assert spans["root"].status == "error"
    assert len(traced.receiver.trace(traced.trace_id)) == 1, "a refused request was continued"


def test_a_preempted_request_has_an_event_with_its_time(run_stack, receiver, prompts):
    """A pool that holds the prompts and not two whole answers: a parked sequence has an event with its time."""
    env = {"OTEL_EXPORTER_OTLP_ENDPOINT": receiver.endpoint}
    with run_stack("tight", num_prefill=0, env=env, options=("--num-blocks", "24", "--threads", "1")) as stack:
        client, many = Client(stack.target), [Traced(receiver) for _ in range(3)]
        with stack.armed(SLOW_STEPS):
            fields = {**LONG, "max_tokens": 400}
            calls = [client.stream(prompts(100), metadata=each.metadata, **fields) for each in many]
            next(calls[0]), next(calls[1])  # from here on they run side by side
        for call in calls:
            list(call)
        client.close()
        spans = [each.whole("decode")["decode"] for each in many]
    assert any(span.attributes["baton.num_preemptions"] for span in spans), "all of them fitted"
    for span in spans:
        parked = [name for name, _ in span.events if name == "preemption"]
        assert len(parked) == min(16, span.attributes["baton.num_preemptions"])


def test_a_request_that_moves_has_one_tree_with_an_event(run_stack, receiver, prompts):
    """The decode worker dies and another one continues: one tree, and the event of that."""
    env = {"OTEL_EXPORTER_OTLP_ENDPOINT": receiver.endpoint}
    with run_stack("moved", num_prefill=0, num_decode=2, env=env) as stack:
        client, traced = Client(stack.target), Traced(receiver)
        with stack.armed(SLOW_STEPS):
            call = client.stream(prompts(100), metadata=traced.metadata, **LONG)
            next(call), next(call)
            busy = next(process for process in stack.decode if _num_running(process))
            busy.kill()
        assert list(call)
        client.close()
        # One is emitted by the gateway, the other by the worker that continued.
        receiver.wait_for(lambda _: len(_named(receiver, traced, "decode")) == 2, timeout_s=10)
        spans, decodes = traced.whole("decode"), _named(receiver, traced, "decode")
    root = spans["root"]
    assert root.status == "ok" and root.attributes["baton.num_attempts"] == 2
    ((name, told),) = root.events
    assert name == "migration" and told["baton.phase"] == "decoding" and told["baton.reason"] == "DECODE_WORKER_LOST"
    assert sorted(span.is_error for span in decodes) == [False, True]


def _named(receiver, traced: Traced, name: str) -> list[Span]:
    return [span for span in receiver.trace(traced.trace_id) if span.name == name]


def _num_running(process) -> float:
    text = urlopen(f"http://{process.ready()['admin']}/metrics", timeout=10).read().decode()
    return float(re.search(r"^baton_sequences_running\{.*\} (\S+)", text, re.MULTILINE)[1])


def test_a_request_past_its_deadline_has_a_trace(client, traced, prompts, slow):
    with pytest.raises(grpc.RpcError):
        client.generate(prompts(20), metadata=traced.metadata, timeout=1, **{**LONG, "n": 4})
    assert traced.whole()["root"].status in ("error", "cancelled")


@pytest.fixture(scope="module")
def small_stack(run_stack, receiver):
    """16 blocks of 32 tokens on each worker: two long requests do not fit, and one at most may wait. None waits for a
    worker that is gone."""
    env = {"OTEL_EXPORTER_OTLP_ENDPOINT": receiver.endpoint}
    gateway_options = ("--max-queued-requests", "1", "--max-start-wait-s", "0")
    options = {"options": ("--num-blocks", "16", "--threads", "1"), "gateway_options": gateway_options}
    with run_stack("small", env=env, **options) as stack:
        yield stack


@pytest.fixture(scope="module")
def small_client(small_stack):
    client = Client(small_stack.target)
    yield client
    client.close()


def test_a_refused_request_has_a_trace_that_ends_at_admission(small_stack, small_client, receiver, prompts):
    """More than fits and may wait: RESOURCE_EXHAUSTED with a delay, and a trace that ends at the door."""
    many, fields = [Traced(receiver) for _ in range(12)], {**LONG, "max_tokens": 150}
    with small_stack.armed(SLOW_STEPS):
        requests = [make_request(prompts(300), **fields) for _ in many]
        generate = small_client.stub.Generate
        calls = [generate(request, metadata=each.metadata) for request, each in zip(requests, many, strict=True)]
        ends_at = time.monotonic() + 20
        while all(call.is_active() for call in calls):  # the first to end is one that is refused
            assert time.monotonic() < ends_at, "all of them fitted"
            time.sleep(0.01)
    refused = {}
    for call, each in zip(calls, many, strict=True):
        try:
            list(call)
        except grpc.RpcError as error:
            refused[each] = read_error(error)
    assert refused, "all of them fitted"
    for each, error in refused.items():
        assert error.code == grpc.StatusCode.RESOURCE_EXHAUSTED and error.retry_after_s > 0, error
        spans = each.whole()
        assert spans["root"].status == "error" and "prefill" not in spans
        assert "admit" not in spans or spans["admit"].is_error


def test_a_request_that_fails_in_mid_stream_has_a_trace(small_stack, small_client, traced, prompts):
    """The decode worker is killed in mid-stream (last: this stack is of no use afterwards)."""
    with small_stack.armed(SLOW_STEPS):
        call = small_client.stream(prompts(100), metadata=traced.metadata, **{**LONG, "max_tokens": 400})
        next(call)
        next(call)
        small_stack.decode[0].kill()
    with pytest.raises(grpc.RpcError) as caught:
        list(call)
    assert read_error(caught.value).code == grpc.StatusCode.UNAVAILABLE
    spans = traced.whole("decode")
    root, decode = spans["root"], spans["decode"]
    assert root.status == "error" and root.is_error and root.attributes["baton.phase"] == "decoding"
    assert root.attributes["error.type"] == "DECODE_WORKER_LOST"
    # The worker cannot say it any more.
    assert decode.is_error and decode.pid == root.pid and decode.attributes["baton.seen_by"] == "gateway"
    assert not spans["route"].is_error and not spans["admit"].is_error


def test_prompts_stay_inside(stack, client, traced):
    """Neither spans nor logs carry what a client has written or what it was answered."""
    secret = "Xyzzy-plugh-42-canary"
    reply = client.generate(secret, metadata=traced.metadata, temperature=0.0, max_tokens=12, ignore_eos=True)
    traced.whole(*PARENTS)
    told = stack.text() + "".join(str(span) for span in traced.receiver.trace(traced.trace_id))
    assert secret not in told and "canary" not in told
    assert reply.text.strip() not in told
