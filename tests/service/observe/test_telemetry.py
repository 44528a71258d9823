"""Telemetry against a real OTLP/gRPC receiver, and against a collector that is not there."""

import os
import socket
import subprocess
import sys
import threading
import time
from typing import Any, ClassVar, cast

import pytest

from baton.service.net.collector import collector_endpoint
from baton.service.observe import genai_metrics, telemetry
from baton.service.observe.telemetry import TraceContext
from tests.support.observe.otlp import Receiver
from tests.support.pace import patience


@pytest.fixture(autouse=True)
def off_afterwards():
    yield
    telemetry.shut_down()


def test_one_trace_with_parents_and_links():
    with Receiver() as receiver:
        assert telemetry.setup("tested", receiver.endpoint) and telemetry.enabled()
        clock, begin = telemetry.Clock(), time.monotonic()
        root = telemetry.new_context()
        start, end = clock.wall_ns(begin), clock.wall_ns(begin + 0.25)
        other = telemetry.new_context()
        attributes = {"n": 3, "unset": None}
        child = telemetry.emit_span("child", root, start, end, attributes, status="cancelled", links=[other])
        telemetry.emit_span("grandchild", TraceContext(root.trace_id, child), start, end, status="error")
        telemetry.emit_span("root", TraceContext(root.trace_id, 0), start, end, span_id=root.span_id, kind="server")
        assert telemetry.flush()
        spans = {span.name: span for span in receiver.wait_for(lambda spans: len(spans) == 3)}
    assert {span.trace_id for span in spans.values()} == {f"{root.trace_id:032x}"}
    assert spans["root"].parent_id == "" and spans["root"].kind == "server" and not spans["root"].is_error
    assert spans["child"].parent_id == spans["root"].span_id == f"{root.span_id:016x}"
    assert spans["child"].attributes == {"n": 3, "baton.status": "cancelled"}
    assert spans["child"].links == (f"{other.span_id:016x}",)
    assert spans["grandchild"].parent_id == spans["child"].span_id and spans["grandchild"].is_error
    assert spans["root"].duration_s == pytest.approx(0.25) and spans["root"].service == "tested"


def _readable(span):
    """As the SDK has it, for its own encoder."""
    from opentelemetry import trace
    from opentelemetry.sdk.resources import Resource
    from opentelemetry.sdk.trace import Event, ReadableSpan
    from opentelemetry.sdk.util.instrumentation import InstrumentationScope

    def context(trace_id: int, span_id: int):
        return trace.SpanContext(trace_id, span_id, is_remote=False)

    def present(attributes):
        return {key: value for key, value in attributes.items() if value is not None}

    return ReadableSpan(
        span.name,
        context=context(span.trace_id, span.span_id),
        parent=context(span.trace_id, span.parent_id) if span.parent_id else None,
        resource=Resource.create({"service.name": "tested", "process.pid": os.getpid()}),
        attributes={**present(span.attributes), "baton.status": span.status},
        events=[Event(event.name, present(event.attributes), event.wall_ns) for event in span.events],
        links=[trace.Link(context(link.trace_id, link.span_id)) for link in span.links],
        kind=trace.SpanKind[span.kind.upper()],
        instrumentation_scope=InstrumentationScope("baton"),
        status=trace.Status(trace.StatusCode.ERROR if span.status == "error" else trace.StatusCode.UNSET),
        start_time=span.start_wall_ns,
        end_time=max(span.start_wall_ns, span.end_wall_ns),
    )


def test_spans_are_encoded_as_by_the_sdk():
    from opentelemetry.exporter.otlp.proto.common.trace_encoder import encode_spans

    from baton.service.observe.span_exporter import FinishedSpan, OTLPSpanExporter, SpanExporter

    root, other = telemetry.new_context(), telemetry.new_context()
    events = [telemetry.SpanEvent("retry", 3, {"baton.worker": "w", "unset": None}), telemetry.SpanEvent("bare", 4)]
    spans = [
        FinishedSpan(
            "span",
            *root[:2],
            5,
            1,
            2,
            {"value": value, "more": value, "n": 1, "unset": None},
            *("ok", "internal"),
            [],
            [],
        )
        for value in ("text", "", "é\u2028", 0, 1, -5, 2**62, True, False, 0.0, 1.0, float("inf"), [], ["a", 2, 0.5])
    ]
    spans.append(FinishedSpan("all", *root[:2], 7, 5, 4, {}, "error", "server", [other], events))
    spans.append(FinishedSpan("root", *root[:2], 0, 0, 2**62, {}, "cancelled", "client", [], []))
    exporter = SpanExporter("tested", endpoint="http://127.0.0.1:1", insecure=True)
    for part in (spans[:3], spans):
        assert _without_instance(exporter.encode(part)) == _without_instance(encode_spans([*map(_readable, part)]))
    exporter.shutdown()
    assert "_translate_data" in vars(OTLPSpanExporter), "the SDK no longer asks for it: no span is sent"


def _without_instance(request):
    """An id that is drawn anew with each resource."""
    attributes = request.resource_spans[0].resource.attributes
    kept = [each for each in attributes if each.key != "service.instance.id"]
    del attributes[:]
    attributes.extend(sorted(kept, key=lambda each: each.key))
    return request


def test_spans_arrive_without_a_flush():
    with Receiver() as receiver:
        telemetry.setup("tested", receiver.endpoint)
        telemetry.emit_span("alone", telemetry.new_context(), 1, 2)
        receiver.wait_for(lambda spans: len(spans) == 1, telemetry.FLUSH_S)


def test_what_is_emitted_later_arrives_and_what_cannot_be_emitted_is_told(caplog):
    def emit(name: str) -> None:
        telemetry.emit_span(name, telemetry.new_context(), 1, 1 // len(name))

    with Receiver() as receiver:
        telemetry.setup("tested", receiver.endpoint)
        for name in ("first", "", "second"):
            telemetry.emit_later(emit, name)
        receiver.wait_for(lambda spans: len(spans) == 2, telemetry.FLUSH_S)
        telemetry.emit_later(emit, "at the end")
        telemetry.shut_down()
        assert [span.name for span in receiver.wait_for(lambda spans: spans)] == ["first", "second", "at the end"]
    assert "ZeroDivisionError" in caplog.text and "could not be emitted" in caplog.text


def test_a_span_that_cannot_be_encoded_holds_up_no_other(caplog):
    with Receiver() as receiver:
        telemetry.setup("tested", receiver.endpoint)
        for value in (1 << 70, 1, object(), "\ud800"):
            telemetry.emit_span("span", telemetry.new_context(), 1, 2, {"value": value})
        telemetry.flush()
        telemetry.emit_span("span", telemetry.new_context(), 1, 2, {"value": 2})
        spans = receiver.wait_for(lambda spans: len(spans) == 2, telemetry.FLUSH_S)
    assert [span.attributes["value"] for span in spans] == [1, 2]
    assert caplog.text.count("could not be encoded") == 3


def test_what_a_slow_collector_leaves_is_emitted_meanwhile_and_what_is_dropped_is_told(caplog, monkeypatch):
    from baton.service.observe import span_sender

    emitted, sender = [], None

    class Exporter:
        """One that hears of a request in each export, and fails once."""

        def send(self, spans):
            if not emitted:
                raise OSError("once")
            if len(emitted) < 4:
                sender.emit_later(emitted.append, "meanwhile")
                sender.add(*[None] * 11)
            return True

        def shutdown(self):
            pass

    monkeypatch.setattr(span_sender, "_MAX_WAITING", 2)
    sender = span_sender.SpanSender(cast(Any, Exporter()), interval_s=0.01)
    with sender._sending:
        for _ in range(5):
            sender.add(*[None] * 11)
    deadline = time.monotonic() + patience(10)
    while "dropped" not in caplog.text and time.monotonic() < deadline:
        time.sleep(0.005)
    emitted.append("first")
    sender.add(*[None] * 11)
    sender.flush()
    sender.shut_down()
    assert emitted == ["first", "meanwhile", "meanwhile", "meanwhile"]
    assert "3 spans were dropped" in caplog.text and "could not be sent" in caplog.text


def test_spans_that_a_collector_did_not_take_wait_and_those_that_are_dropped_are_counted(caplog, monkeypatch):
    from baton.service.observe import span_sender

    sent: list[str] = []

    class Exporter:
        """One that is down until it is up."""

        is_up = False

        def send(self, spans):
            sent.extend(span.name for span in spans if self.is_up)
            return self.is_up

        def shutdown(self):
            pass

    def add(name: str) -> None:
        sender.add(name, *[None] * 10)

    monkeypatch.setattr(span_sender, "_MAX_WAITING", 4)
    monkeypatch.setattr(span_sender, "_BATCH", 3)
    monkeypatch.setattr(span_sender, "_EMIT_S", 3600)  # nothing is sent but by `flush`
    exporter = Exporter()
    sender = span_sender.SpanSender(cast(Any, exporter), interval_s=3600)
    for name in "abc":
        add(name)
    sender.flush()
    add("d")
    sender.flush()
    exporter.is_up = True
    sender.flush()
    assert sent == list("abcd")
    sent.clear()
    exporter.is_up = False
    add("e")
    sender.flush()
    for name in "fghi":
        add(name)
    sender.flush()  # "e" is the oldest, and there is no room
    exporter.is_up = True
    sender.flush()
    assert sent == list("fghi")
    exporter.is_up = False
    add("j")
    sender.shut_down()
    assert "2 spans were dropped" in caplog.text


def test_what_a_collector_never_takes_holds_up_no_other(caplog, monkeypatch):
    """As a batch that it finds invalid, or too large: those behind it waited until there was no room."""
    from baton.service.observe import span_sender

    sent: list[str] = []

    class Exporter:
        def send(self, spans):
            names = [span.name for span in spans]
            sent.extend(name for name in names if "bad" not in names)
            return "bad" not in names

        def shutdown(self):
            pass

    monkeypatch.setattr(span_sender, "_EMIT_S", 3600)  # nothing is sent but by `flush`
    sender = span_sender.SpanSender(cast(Any, Exporter()), interval_s=3600)
    for name in ("bad", *"abcdef"):
        sender.add(name, *[None] * 10)
        sender.flush()
    assert sent == list("abcdef")
    sender.shut_down()
    assert "1 spans were dropped: the collector did not take them" in caplog.text


def test_a_collector_that_takes_nothing_is_tried_less_often():
    from baton.service.observe import span_sender

    class Exporter:
        """One that fails twice."""

        tried: ClassVar[list[tuple[float, int]]] = []

        def send(self, spans):
            self.tried.append((time.monotonic(), len(spans)))
            return len(self.tried) > 2

        def shutdown(self):
            pass

    sender = span_sender.SpanSender(cast(Any, Exporter()), interval_s=0.02)
    deadline = time.monotonic() + patience(10)
    while len(Exporter.tried) < 5 and time.monotonic() < deadline:
        sender.add(*[None] * 11)
        time.sleep(0.005)
    sender.shut_down()
    first, second, third, fourth, fifth, *_ = (at for at, _ in Exporter.tried)
    assert second - first >= 0.03 and third - second >= 0.06
    assert fifth - fourth >= 0.01, "the fourth had what came meanwhile, right behind the third"


def test_spans_wait_for_the_interval_or_for_a_full_batch(monkeypatch):
    from baton.service.observe import span_sender

    sent: list[int] = []

    class Exporter:
        def send(self, spans):
            sent.append(len(spans))
            return True

        def shutdown(self):
            pass

    monkeypatch.setattr(span_sender, "_EMIT_S", 0.005)
    monkeypatch.setattr(span_sender, "_BATCH", 4)
    sender = span_sender.SpanSender(cast(Any, Exporter()), interval_s=3600)
    for _ in range(3):
        sender.add(*[None] * 11)
        emitted = threading.Event()
        sender.emit_later(emitted.set)
        assert emitted.wait(patience(10)) and not sent
    sender.add(*[None] * 11)
    deadline = time.monotonic() + patience(10)
    while not sent and time.monotonic() < deadline:
        time.sleep(0.005)
    assert sent == [4]
    sender.add(*[None] * 11)
    sender.shut_down()
    assert sent == [4, 1]


@pytest.mark.parametrize(("value", "seconds"), [("", 5.0), ("250", 0.25), ("0", 5.0), ("1 s", 5.0)])
def test_the_interval_is_the_environments(monkeypatch, caplog, value, seconds):
    monkeypatch.setenv("OTEL_BSP_SCHEDULE_DELAY", value)
    assert telemetry._export_interval_s() == seconds
    assert ("OTEL_BSP_SCHEDULE_DELAY is" in caplog.text) == (value in ("0", "1 s"))


def test_a_while_without_spans_does_not_bring_a_failing_collector_back():
    from baton.service.observe import span_sender

    tried: list[float] = []

    class Exporter:
        def send(self, spans):
            tried.append(time.monotonic())
            return False

        def shutdown(self):
            pass

    sender = span_sender.SpanSender(cast(Any, Exporter()), interval_s=0.02)
    deadline = time.monotonic() + patience(10)
    for number in (1, 2):
        sender.add(*[None] * 11)
        while len(tried) < number and time.monotonic() < deadline:
            time.sleep(0.005)
        time.sleep(0.3 if number == 1 else 0)  # many turns of its thread, none of which has anything to send
    sender.add(*[None] * 11)
    while len(tried) < 3 and time.monotonic() < deadline:
        time.sleep(0.005)
    sender.shut_down()
    assert tried[2] - tried[1] >= 0.07, "twice as long as behind the first try"


def test_not_sampled_by_the_caller_is_not_sent():
    with Receiver() as receiver:
        telemetry.setup("tested", receiver.endpoint)
        parent = telemetry.parse_traceparent("00-" + "a" * 32 + "-" + "b" * 16 + "-00")
        telemetry.emit_span("hidden", telemetry.new_context(parent), 1, 2)
        telemetry.emit_span("seen", telemetry.new_context(), 1, 2)
        assert telemetry.flush()
        assert [span.name for span in receiver.wait_for(lambda spans: spans)] == ["seen"]


PROGRAM = """
import sys
from baton.service.observe import genai_metrics; from baton.service.observe import telemetry
telemetry.setup("child")
for index in range(3):
    telemetry.emit_span(f"span {index}", telemetry.new_context(), 1, 2)
print(telemetry.enabled(), "opentelemetry.sdk" in sys.modules)
"""


def run_child(endpoint: str | None) -> str:
    return run_program(PROGRAM, endpoint).stdout


def run_program(program: str, endpoint: str | None, **variables: str) -> subprocess.CompletedProcess:
    env = {key: value for key, value in os.environ.items() if not key.startswith("OTEL_")} | variables
    if endpoint:
        env["OTEL_EXPORTER_OTLP_ENDPOINT"] = endpoint
    # The bound is for a run that hangs; exit itself waits 5 s at most.
    done = subprocess.run([sys.executable, "-c", program], env=env, capture_output=True, text=True, timeout=30)
    assert done.returncode == 0, done.stderr
    return done


def test_flushed_at_exit():
    with Receiver() as receiver:
        assert run_child(receiver.endpoint) == "True True\n"
        spans = receiver.wait_for(lambda spans: len(spans) == 3)
    assert {span.service for span in spans} == {"child"}


def test_off_without_endpoint():
    assert run_child(None) == "False False\n"


@pytest.mark.parametrize("collector", ["refuses", "hangs"])
def test_dead_collector_does_not_hold_the_exit(collector):
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        if collector == "hangs":
            listener.listen()
        assert run_child("http://127.0.0.1:%d" % listener.getsockname()[1]) == "True True\n"


FAILING = """
import logging
from opentelemetry.sdk._shared_internal import DuplicateFilter
from baton.service import logs
from baton.service.observe import genai_metrics, telemetry
DuplicateFilter.filter = lambda self, record: True  # it forgets every 20 s
seen = []
logs.setup("child")
watch = logging.Handler()
watch.emit = seen.append
logging.getLogger().addHandler(watch)
telemetry.EXPORT_TIMEOUT_S = genai_metrics.EXPORT_TIMEOUT_S = 0.2
telemetry.setup("child"), genai_metrics.setup("child")
for index in range(4):
    telemetry.emit_span(f"span {index}", telemetry.new_context(), 1, 2)
    genai_metrics.observe("chat", "tiny", 2.0)
    telemetry.flush(), genai_metrics._sender.provider.force_flush()
print(sum(record.name.startswith("opentelemetry") for record in seen))
"""


@pytest.mark.parametrize("collector", ["refuses", "hangs"])
def test_exporters_that_fail_say_so_once_a_minute(collector):
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        if collector == "hangs":
            listener.listen()
        endpoint = "http://127.0.0.1:%d" % listener.getsockname()[1]
        done = run_program(FAILING, endpoint)
    assert int(done.stdout) > 1, done.stderr  # that the exporters would have said
    assert sum("xport" in line for line in done.stderr.splitlines()) == 1, done.stderr


@pytest.mark.parametrize("name, other", [("CLIENT_KEY", "CLIENT_CERTIFICATE"), ("CLIENT_CERTIFICATE", "CLIENT_KEY")])
def test_half_a_pair_of_a_client_certificate_ends_no_process(tmp_path, name, other):
    """Neither one that is not named, nor one whose file is not there."""
    file, missing = tmp_path / "own.pem", tmp_path / "none.pem"
    file.write_text("anything")
    for pair, words in (
        ({name: file}, "OTEL_EXPORTER_OTLP_CLIENT_KEY and OTEL_EXPORTER_OTLP_CLIENT_CERTIFICATE go together"),
        ({name: file, other: missing}, f"OTEL_EXPORTER_OTLP_{other}: {missing}: No such file"),
    ):
        variables = {f"OTEL_EXPORTER_OTLP_{key}": str(path) for key, path in {"CERTIFICATE": file, **pair}.items()}
        done = run_program(SETTING_UP, "https://127.0.0.1:1", **variables)
        assert done.stdout == "False False\n"
        assert f"no spans are sent: {words}" in done.stderr and f"no metrics are sent: {words}" in done.stderr


SETTING_UP = """
from baton.service import logs
from baton.service.observe import genai_metrics, telemetry
logs.setup("child")
print(telemetry.setup("child"), genai_metrics.setup("child"))
"""


def test_flush_gives_up_in_time():
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen()
        telemetry.setup("tested", "http://127.0.0.1:%d" % listener.getsockname()[1])
        telemetry.emit_span("lost", telemetry.new_context(), 1, 2)
        assert telemetry.flush(0.05) is False
        telemetry.shut_down(0.05)
        assert not telemetry.enabled()


def test_traceparent_both_ways():
    context = telemetry.new_context()
    assert telemetry.parse_traceparent(telemetry.format_traceparent(context)) == context
    child = telemetry.new_context(context)
    assert child.trace_id == context.trace_id and child.span_id != context.span_id
    assert telemetry.parse_traceparent("00-" + "a" * 32 + "-" + "b" * 16 + "-00").sampled is False


@pytest.mark.parametrize(
    "text",
    ["", "x", "00-" + "0" * 32 + "-" + "b" * 16 + "-01", "00-" + "a" * 32 + "-" + "0" * 16 + "-01"]
    + ["ff-" + "a" * 32 + "-" + "b" * 16 + "-01", "00-" + "A" * 32 + "-" + "b" * 16 + "-01"]
    + ["00-" + "a" * 32 + "-" + "b" * 16 + "-01-more"],
)
def test_broken_traceparent_is_none(text):
    assert telemetry.parse_traceparent(text) is None


def test_events_of_a_span():
    with Receiver() as receiver:
        telemetry.setup("tested", receiver.endpoint)
        events = [telemetry.SpanEvent("retry", 2, {"why": "full", "unset": None}), telemetry.SpanEvent("bare", 3)]
        telemetry.emit_span("told", telemetry.new_context(), 1, 4, events=events)
        assert telemetry.flush()
        (span,) = receiver.wait_for(lambda spans: spans)
    assert span.events == (("retry", {"why": "full"}), ("bare", {}))


def test_an_id_that_another_process_can_make():
    one = telemetry.span_id_of(5, "request", 1, "prefill")
    assert one == telemetry.span_id_of(5, "request", 1, "prefill") and 0 < one < 1 << 64
    others = {telemetry.span_id_of(5, "request", 2, "prefill"), telemetry.span_id_of(6, "request", 1, "prefill")}
    assert one not in others and len(others) == 2


@pytest.mark.parametrize("share, least, most", [(0.0, 0, 0), (0.25, 180, 320), (1.0, 1000, 1000)])
def test_a_share_is_sampled(share, least, most):
    """0.25 of 1,000: five standard deviations each way."""
    assert least <= sum(telemetry.new_context(None, share).sampled for _ in range(1000)) <= most
    parent = telemetry.new_context()
    assert telemetry.new_context(parent, 0.0).sampled


def test_metrics_over_otlp():
    with Receiver() as receiver:
        assert genai_metrics.setup("tested", receiver.endpoint)
        genai_metrics.observe("chat", "tiny", 2.0, 0.5, 0.05)
        genai_metrics.observe("chat", "tiny", 0.1, error_type="OVERLOADED")
        genai_metrics.shut_down()
        points = {(point.name, point.attributes.get("error.type")): point for point in receiver.metrics.points}
    assert {name for name, _ in points} == {
        f"gen_ai.server.{name}" for name in ("request.duration", "time_to_first_token", "time_per_output_token")
    }
    answered, refused = (points["gen_ai.server.request.duration", error] for error in (None, "OVERLOADED"))
    assert (answered.sum, answered.count, refused.sum) == (2.0, 1, 0.1)
    assert answered.attributes["gen_ai.provider.name"] == "baton" and answered.service == "tested"


def test_metrics_are_off_without_an_endpoint_or_when_told(monkeypatch):
    monkeypatch.delenv("OTEL_EXPORTER_OTLP_ENDPOINT", raising=False)
    assert not genai_metrics.setup("tested")
    genai_metrics.observe("chat", "tiny", 2.0)
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", "http://127.0.0.1:1")
    monkeypatch.setenv("OTEL_METRICS_EXPORTER", "none")
    assert not genai_metrics.setup("tested")


@pytest.mark.parametrize(
    "variables, traces, metrics",
    [
        ({}, "", ""),
        ({"EXPORTER_OTLP_ENDPOINT": "http://c"}, "http://c", "http://c"),
        ({"EXPORTER_OTLP_TRACES_ENDPOINT": "http://t"}, "http://t", ""),
        ({"EXPORTER_OTLP_ENDPOINT": "http://c", "EXPORTER_OTLP_METRICS_ENDPOINT": "http://m"}, "http://c", "http://m"),
        ({"EXPORTER_OTLP_ENDPOINT": "http://c", "TRACES_EXPORTER": "none"}, "", "http://c"),
        ({"EXPORTER_OTLP_ENDPOINT": "http://c", "SDK_DISABLED": "True"}, "", ""),
    ],
)
def test_the_collector_that_the_variables_name(monkeypatch, variables, traces, metrics):
    for name in [name for name in os.environ if name.startswith("OTEL_")]:
        monkeypatch.delenv(name)
    for name, value in variables.items():
        monkeypatch.setenv(f"OTEL_{name}", value)
    assert (collector_endpoint("TRACES"), collector_endpoint("METRICS")) == (traces, metrics)


@pytest.mark.parametrize(
    "name, value",
    [("OTEL_EXPORTER_OTLP_COMPRESSION", "zstd"), ("OTEL_SPAN_ATTRIBUTE_COUNT_LIMIT", "x"), ("", "http://[::1")],
)
def test_a_variable_that_cannot_be_used_is_a_line_and_ends_no_process(name, value):
    variables = {name: value} if name else {}
    done = run_program(SETTING_UP, "http://127.0.0.1:1" if name else value, **variables)
    assert done.stdout.startswith("False")
    assert "no spans are sent: " in done.stderr and "Traceback" not in done.stderr


def test_a_collector_that_hangs_holds_no_metrics_up(caplog):
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen()
        listener.settimeout(patience(10))
        genai_metrics.setup("tested", "http://127.0.0.1:%d" % listener.getsockname()[1])
        genai_metrics.observe("chat", "tiny", 2.0)
        genai_metrics.shut_down(0.05)
        assert "the collector did not take the last metrics" in caplog.text, "it has waited for it"
        listener.accept()[0].close()  # it was asked
