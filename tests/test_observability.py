"""docs/observability.md names every metric, label, span, event, attribute, log field, phase and alert that the code
has, and no other."""

import os
import re

import pytest
import yaml

from baton.service.net.collector import collector_endpoint
from gateway.observe.access_log import line
from gateway.request.timing import PHASES
from tests.support.gateway.request_records import ANSWERED, record
from tests.support.observe.emitted_names import ROOT, attributes, event_names, metrics, span_names

PAGE = (ROOT / "docs" / "observability.md").read_text()


def section(title: str) -> str:
    (text,) = re.findall(rf"^## {title}\n(.*?)(?=^## |\Z)", PAGE, re.DOTALL | re.MULTILINE)
    return text


def first_cells(text: str) -> list[str]:
    return [cell for row in re.findall(r"^\| (.*?) \|", text, re.MULTILINE) for cell in re.findall(r"`([^`]+)`", row)]


def test_the_page_lists_all_metrics():
    rows = re.findall(r"^\| `(baton_\w+)` \| (\w+) \| (.*?) \| (.*?) \| (\w+) \|$", section("Metrics"), re.MULTILINE)
    told = {
        (name, kind, tuple(re.findall(r"`(\w+)`:", labels)), text, where) for name, kind, labels, text, where in rows
    }
    assert told == {(each.name, each.kind, each.labels, each.text, each.where) for each in metrics()}
    assert len(rows) == len(told)


def test_metrics_over_otlp():
    source = (ROOT / "baton/service/observe/genai_metrics.py").read_text()
    names = re.findall(r'histogram\("([\w.]+)"', source)
    assert set(re.findall(r"`gen_ai\.server\.([\w.]+)`", section("Metrics"))) == set(names) and len(names) == 3


def test_the_page_lists_all_attributes_of_spans():
    cells = first_cells(section("Traces"))
    told = [cell for cell in cells if re.match(r"(gen_ai|baton|rpc|error)\.", cell)]
    assert len(set(told)) == len(told)
    assert set(told) == attributes()


def test_spans_and_events():
    tree = re.search(r"```\n(\{operation.*?)```", section("Traces"), re.DOTALL)[1]
    assert set(re.findall(r"─ ([a-z.]+)", tree)) == span_names()
    events = ", ".join(names.strip() for names in re.findall(r"events?: ([a-z, ]+)", tree))
    assert set(events.split(", ")) == event_names()


def test_the_page_lists_all_log_fields():
    text = section("The log line of a request")
    told = set(first_cells(text)) - {"tokenize_ms", "decode_ms"}
    fields = set(line(record(**ANSWERED), None))
    assert told == fields - {f"{phase}_ms" for phase in PHASES}
    shown = re.findall(r"(\w+)=", re.search(r"```\n(.*?)```", text, re.DOTALL)[1])
    assert shown == list(line(record(**ANSWERED), None))


def test_the_page_draws_all_phases():
    drawn = re.search(r"```\n(.*?)```", section("The phases of a request"), re.DOTALL)[1]
    assert tuple(re.findall(r"\b([a-z]+(?:_[a-z]+)?) ▸", drawn)) == PHASES


def test_the_page_lists_all_alerts():
    rules = [rule for path in (ROOT / "deploy/prometheus/rules").glob("*.yml") for rule in rules_of(path)]
    alerts = {rule["alert"] for rule in rules if "alert" in rule}
    assert set(first_cells(section("Dashboards and alerts"))) == alerts


def rules_of(path) -> list[dict]:
    return [rule for group in yaml.safe_load(path.read_text())["groups"] for rule in group["rules"]]


@pytest.mark.parametrize("name", ["OTEL_EXPORTER_OTLP_ENDPOINT", "OTEL_METRICS_EXPORTER"])
def test_the_page_names_the_variables_of_metrics(name, monkeypatch):
    """The page names the variable, and it is followed."""
    for other in [other for other in os.environ if other.startswith("OTEL_")]:
        monkeypatch.delenv(other)
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", "http://c")
    before = collector_endpoint("METRICS")
    monkeypatch.setenv(name, "none")
    assert name in PAGE and before == "http://c" != collector_endpoint("METRICS")
