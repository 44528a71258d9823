"""A worker whose clock is 90 s ahead: the gateway finds it out by the beat, says it everywhere, and traces hold
together."""

import time
from urllib.request import urlopen

import grpc
import pytest
from prometheus_client.parser import text_string_to_metric_families as parse

from baton.cli.main import main
from baton.v1 import fleet_pb2, fleet_pb2_grpc
from tests.e2e.conftest import GATEWAY_OPTIONS, OPTIONS
from tests.support.client import Client
from tests.support.observe.traced import CLOCK_TOLERANCE_NS, Traced
from tests.support.pace import patience
from tests.support.stack import Stack

AHEAD_S = 90
# Loaded by every interpreter that has it on its path; what it does, it does to decode workers only.
SKEW = f"""
import time
if b"decode_worker" in open("/proc/self/cmdline", "rb").read():
    real = time.time_ns
    time.time_ns = lambda: real() + {AHEAD_S} * 10**9
"""


@pytest.fixture(scope="module")
def skewed(model, receiver, tmp_path_factory):
    folder = tmp_path_factory.mktemp("skewed")
    (folder / "sitecustomize.py").write_text(SKEW)
    env = {"OTEL_EXPORTER_OTLP_ENDPOINT": receiver.endpoint, "PYTHONPATH": str(folder)}
    with Stack(model, folder / "logs", options=OPTIONS, gateway_options=GATEWAY_OPTIONS, env=env) as stack:
        deadline = time.monotonic() + patience(20)
        while not all(view.HasField("clock_offset_s") for view in workers(stack)):
            assert time.monotonic() < deadline, "the clocks are not compared"
            time.sleep(0.05)
        yield stack


def workers(stack) -> list[fleet_pb2.WorkerView]:
    with grpc.insecure_channel(stack.target) as channel:
        return list(fleet_pb2_grpc.FleetStub(channel).ListWorkers(fleet_pb2.ListWorkersRequest(), timeout=10).workers)


def test_the_fleet_view_says_it(skewed):
    found = {view.role: (view.clock_offset_s, view.clock_error_s) for view in workers(skewed)}
    ahead_s, error_s = found["decode"]
    # Pairing two clocks once a process takes a moment of its own.
    assert abs(ahead_s - AHEAD_S) <= error_s + 0.005 and error_s < 1
    same_s, error_s = found["prefill"]
    assert abs(same_s) <= error_s + 0.005


def test_metrics_and_top_say_it(skewed, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "160")
    text = urlopen(f"http://{skewed.gateways[0].ready()['admin']}/metrics", timeout=10).read().decode()
    seen = {
        (sample.name, sample.labels.get("worker")): sample.value
        for family in parse(text)
        for sample in family.samples
        if sample.name.startswith("baton_clock")
    }
    worker = skewed.address["decode0"]
    assert seen["baton_clock_offset_seconds", worker] == pytest.approx(AHEAD_S, abs=1)
    assert 0 < seen["baton_clock_error_seconds", worker] < 1
    assert main(["top", "--target", skewed.target, "--once"]) == 0
    line = next(line for line in capsys.readouterr().out.splitlines() if f"decode {worker}" in line)
    assert "+90" in line or "+89" in line


def test_spans_are_put_right(skewed, receiver, prompts):
    """Every worker's span has the seconds that were subtracted."""
    client, deadline = Client(skewed.target), time.monotonic() + patience(20)
    while True:
        traced = Traced(receiver)
        client.generate(prompts(100), metadata=traced.metadata, temperature=0.0, max_tokens=4, ignore_eos=True)
        spans = traced.whole("prefill", "kv.transfer", "decode", "decode.steps")
        if "baton.clock.offset_s" in spans["decode"].attributes:
            break
        assert time.monotonic() < deadline, "no beat has sent the worker its offset"
    client.close()
    root = spans["root"]
    for name in ("kv.transfer", "decode", "decode.steps"):
        assert spans[name].start_ns >= root.start_ns - CLOCK_TOLERANCE_NS
        assert spans[name].end_ns < root.end_ns + 10 * 10**9, f"{name} ends by its worker's clock"
    told = spans["decode"].attributes
    assert told["baton.clock.offset_s"] == pytest.approx(AHEAD_S, abs=1) and told["baton.clock.error_s"] < 1
    assert spans["prefill"].attributes["baton.clock.offset_s"] == pytest.approx(0, abs=1)
