"""deploy/prometheus and deploy/grafana: every query names metrics and labels that the code has, none is forgotten."""

import json
import re
import shutil
import subprocess
from collections.abc import Iterator
from types import SimpleNamespace

import pytest
import yaml

from baton.loadgen import plot
from baton.service.observe import bottleneck
from baton.service.observe.phases import COLORS
from baton.service.observe.process_gauges import process_gauges
from baton.service.slo import Slo
from gateway.api.dashboard import pages
from gateway.link.worker_breaker import BreakerState
from gateway.link.worker_link import LinkState
from gateway.observe.gauges import fleet_gauges
from gateway.observe.meters import _OBJECTIVES
from gateway.observe.recent_requests import PHASE_OF
from gateway.request.timing import PHASES
from tests.support.observe.deployed import ALL_RULES, DASHBOARDS, DEPLOY, RULES, panels
from tests.support.observe.emitted_names import metrics

RULE_TESTS = sorted((DEPLOY / "prometheus" / "tests").glob("*.yml"))
RECORDED = {rule["record"] for rule in ALL_RULES if "record" in rule}
METRICS = metrics()
SERIES = {series: metric for metric in METRICS for series in metric.series}
# Values that labels may have, where queries name them.
VALUES = {
    "phase": set(PHASES),
    "objective": set(_OBJECTIVES),
    "state": {state.value for state in (*LinkState, *BreakerState)},
    "holder": {"quarantined", "fetching", "leased", "running", "cached", "free"},
    "outcome": {"ok", "cancelled", "refused", "failed"},
    "kind": {"input", "cached", "output"},
    "result": {"accepted", "rejected"},
}


def queries() -> Iterator[tuple[str, str]]:
    """(where, PromQL) of all rules and panels."""
    for rule in ALL_RULES:
        yield rule.get("alert") or rule["record"], rule["expr"]
    for path in DASHBOARDS:
        for panel in panels(path):
            for target in panel["targets"]:
                yield f"{path.stem}: {panel['title']}", target["expr"]


QUERIES = list(queries())


def test_a_phase_has_one_name_and_colour_everywhere():
    """Those of baton/service/observe/phases.py: in dashboards, on the page, in the report, and of running requests."""
    by_phase = [
        panel
        for path in DASHBOARDS
        for panel in panels(path)
        if any(target.get("legendFormat") == "{{phase}}" for target in panel["targets"])
    ]
    assert len(by_phase) == 5
    for panel in by_phase:
        drawn = {
            override["matcher"]["options"]: override["properties"][0]["value"]["fixedColor"]
            for override in panel["fieldConfig"]["overrides"]
        }
        assert drawn == COLORS, panel["title"]
    assert tuple(COLORS) == PHASES and set(PHASE_OF.values()) <= set(PHASES)
    spent = dict.fromkeys(PHASES, 1.0)
    drawn = re.findall(r'fill="(#\w+)"><title>(\w+) ', plot.stack(spent, "ms", COLORS))
    assert {name: color for color, name in drawn} == COLORS
    gateway_page = bytes(pages(SimpleNamespace())["/"].make(None).body).decode()
    (inside,) = re.findall(r"^const PHASE_COLORS = (.*);$", gateway_page, re.MULTILINE)
    assert json.loads(inside) == COLORS


def test_four_dashboards_with_queries_and_words():
    boards = [json.loads(path.read_text()) for path in DASHBOARDS]
    assert [board["uid"] for board in boards] == ["baton-fleets", "baton-kv", "baton-phases", "baton-slo"]
    sources = yaml.safe_load((DEPLOY / "grafana/provisioning/datasources/baton.yml").read_text())["datasources"]
    uids = {source["uid"] for source in sources}
    for path, board in zip(DASHBOARDS, boards, strict=True):
        assert path.stem == board["uid"] and board["description"]
        ids = [panel["id"] for panel in board["panels"]]
        assert len(set(ids)) == len(ids)
        for panel in panels(path):
            assert panel["targets"] and panel["description"], panel["title"]
            assert panel["datasource"]["uid"] in uids and panel["fieldConfig"]["defaults"]["unit"]
            assert panel["gridPos"]["x"] + panel["gridPos"]["w"] <= 24


def test_panels_of_a_latency_lead_to_traces():
    for path in DASHBOARDS:
        for panel in panels(path):
            if any(
                re.search(r"(ttft|tpot|itl|e2e|phase)_seconds_bucket", target["expr"]) for target in panel["targets"]
            ):
                assert all(target["exemplar"] for target in panel["targets"])
                assert panel["fieldConfig"]["defaults"]["links"]


def test_the_bands_of_the_first_token():
    (panel,) = [panel for panel in panels(DASHBOARDS[-1]) if panel["title"] == "Time to first token"]
    assert [step["value"] for step in panel["fieldConfig"]["defaults"]["thresholds"]["steps"]] == [None, 0.3, 1, 2]
    assert [target["legendFormat"] for target in panel["targets"]] == ["p50", "p95", "p99"]


@pytest.mark.parametrize("where, query", QUERIES, ids=[f"{index}" for index in range(len(QUERIES))])
def test_a_query_names_what_the_code_has(where, query):
    without_words = re.sub(r'"[^"]*"', '""', query)
    assert without_words.count("(") == without_words.count(")"), where
    names = set(re.findall(r"\bbaton[_:][a-z0-9_:]+", without_words))
    assert names or "up{" in query, where
    assert names <= SERIES.keys() | RECORDED, where
    for name, selector in re.findall(r"\b(baton_[a-z0-9_]+)\{([^}]*)\}", query):
        for label, value in re.findall(r'(\w+)(?:=~|!~|!=|=)"([^"]*)"', selector):
            assert label in {*SERIES[name].labels, "model_name", "job", "instance", "namespace"}, (
                f"{where}: {name} has no {label}"
            )
            for word in value.split("|") if label in VALUES else ():
                assert word in VALUES[label], f"{where}: {label} is never {word}"
    grouped = {label for labels in re.findall(r"\bby \(([^)]*)\)", query) for label in re.split(r",\s*", labels)}
    known = {label for name in names & SERIES.keys() for label in SERIES[name].labels}
    assert grouped <= known | {"le", "model_name", "job", "instance", "class", "namespace"}, where


def test_what_is_of_no_model_is_shown_with_each():
    """A gateway of several models has its own readings under no name, which `.+` would leave out."""
    readings = (*fleet_gauges(SimpleNamespace(), SimpleNamespace()), *process_gauges(None))
    nameless = {each.name for each in readings if not each.by_model} | {"baton_denied_total"}
    shown = set()
    for path in DASHBOARDS:
        variables = {each["name"]: each["allValue"] for each in json.loads(path.read_text())["templating"]["list"]}
        assert variables["model"] == ".*"
        for panel in panels(path):
            for name, selector in re.findall(r"\b(baton_[a-z0-9_]+)\{([^}]*)\}", str(panel["targets"])):
                assert ('model_name=~"$model|"' in selector) == (name in nameless), f"{panel['title']}: {name}"
                shown.add(name)
    assert nameless <= shown


def test_the_first_dashboard_ends_with_what_bounds_it():
    """In the words of `baton bench`."""
    panel = panels(DASHBOARDS[-1])[-1]
    query, lowest = panel["targets"][0]["expr"], max(each["gridPos"]["y"] for each in panels(DASHBOARDS[-1]))
    assert panel["title"] == "What bounds it" and panel["gridPos"]["y"] == lowest
    for name in bottleneck.BOTTLENECKS:
        told = re.search(rf'bound="{name}"[^"]*"sentence", "Bound by {name}: (.*?)\. Try this: (.*?)\."', query)
        assert told and told[1] == bottleneck.EVIDENCE[name] and told[2] == bottleneck.LEVERS[name], name
    assert bottleneck.MORE_LOAD in query and f">= {bottleneck.LEAST_AT_ONCE}" in query


def test_what_is_refused_for_want_of_room_is_the_same_in_panel_and_alert():
    (alert,) = [rule["expr"] for rule in ALL_RULES if rule.get("alert") == "BatonRefusals"]
    (panel,) = [query for where, query in QUERIES if where.endswith(": Refusals for want of room")]
    (reasons,) = re.findall(r'reason=~"[^"]*"', alert)
    assert f'outcome="refused",{reasons}' in alert and f'outcome="refused",{reasons}' in panel


def test_no_metric_is_forgotten():
    told = " ".join(query for _, query in QUERIES)
    assert not [each.name for each in METRICS if not any(re.search(rf"\b{name}\b", told) for name in each.series)]


def test_objectives_are_those_of_a_service_level():
    assert set(_OBJECTIVES) == {name.removesuffix("_s") for name in Slo._fields} | {"answer"}


def test_every_alert_says_what_to_do_and_is_tested():
    tested = " ".join(path.read_text() for path in RULE_TESTS)
    for rule in ALL_RULES:
        if "alert" in rule:
            assert rule["annotations"].keys() == {"summary", "action"}
            assert rule["labels"]["severity"] in ("page", "ticket")
            assert re.search(rf"alertname: {rule['alert']}\b", tested), f"{rule['alert']} has no test"


def test_releases_under_one_prometheus_are_told_apart():
    """By their namespace, unless by an address; where there are no namespaces the label is empty, and changes
    nothing."""
    for rule in ALL_RULES:
        for labels in re.findall(r"\b(?:by|on) \(([^)]*)\)", rule["expr"]):
            assert {"namespace", "instance"} & set(re.split(r",\s*", labels)), rule["expr"]
    for path in DASHBOARDS:
        board = json.loads(path.read_text())
        variables = {each["name"]: each for each in board["templating"]["list"]}
        assert variables["namespace"]["allValue"] == ".*"
        for name, each in variables.items():
            assert name == "namespace" or '{namespace=~"$namespace"}' in each["query"]
        for panel in panels(path):
            for target in panel["targets"]:
                selectors = re.findall(r"\b(?:ALERTS|baton[_:][a-z0-9_:]+)(\{[^}]*\})?", target["expr"])
                assert all('namespace=~"$namespace"' in each for each in selectors), target["expr"]
        (alerts,) = [each["expr"] for each in board["annotations"]["list"]]
        assert 'namespace=~"$namespace|"' in alerts  # an alert that an address names may have none


@pytest.mark.long
@pytest.mark.parametrize(
    "arguments",
    [
        ("check", "rules", *RULES),
        ("test", "rules", *RULE_TESTS),
        ("check", "config", DEPLOY / "prometheus/prometheus.yml"),
    ],
    ids=["check rules", "test rules", "check config"],
)
def test_promtool_accepts_rules_their_tests_and_the_config(arguments):
    assert shutil.which("promtool"), "promtool is missing: Debian's package prometheus has it"
    done = subprocess.run(["promtool", *map(str, arguments)], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.long
def test_a_workers_first_xid_is_drawn(tmp_path):
    """No series was there before it."""
    (query,) = [query for _, query in QUERIES if "by (instance, gpu, xid)" in query]
    series = {'baton_gpu_xids_total{instance="d", model_name="m", gpu="1", xid="79"}': "_x4 1x20"}
    check_drawn(tmp_path, query, series, {'{instance="d", gpu="1", xid="79"}': 1})


@pytest.mark.long
def test_what_is_refused_makes_no_phase_shorter(tmp_path):
    """Of 30 requests each 15 s a third is answered: 0.3 s in `tokenize` as all of them, 1.5 s in `prefill`."""
    (query,) = [query for where, query in QUERIES if where.endswith(": Up to the first token")]
    spent = {"tokenize": ("0+9x20", "0+30x20"), "prefill": ("0+15x20", "0+10x20")}
    series = {'baton_requests_total{model_name="m", outcome="ok"}': "0+10x20"}
    series |= {'baton_requests_total{model_name="m", outcome="refused"}': "0+20x20"}
    for phase, (sums, counts) in spent.items():
        series[f'baton_phase_seconds_sum{{model_name="m", phase="{phase}"}}'] = sums
        series[f'baton_phase_seconds_count{{model_name="m", phase="{phase}"}}'] = counts
    check_drawn(tmp_path, query, series, {'{phase="tokenize"}': 0.3, '{phase="prefill"}': 1.5})


def check_drawn(tmp_path, query: str, series: dict[str, str], drawn: dict[str, float]) -> None:
    """What a panel draws of these series after 4 minutes."""
    query = re.sub(r"\$\w+", ".*", query.replace("$__rate_interval", "2m"))
    samples = [{"labels": labels, "value": value} for labels, value in drawn.items()]
    case = {"expr": query, "eval_time": "4m", "exp_samples": samples}
    given = [{"series": name, "values": values} for name, values in series.items()]
    test = {"interval": "15s", "input_series": given, "promql_expr_test": [case]}
    path = tmp_path / "test.yml"
    path.write_text(yaml.safe_dump({"rule_files": [], "tests": [test]}))
    test_promtool_accepts_rules_their_tests_and_the_config(("test", "rules", path))
