"""The chart's rules under a Prometheus that other releases have too: each is of the namespace of its own."""

import re

import pytest
import yaml

from tests.chart.rendering import named, promtool, render


def rules() -> dict:
    return named(render({"monitoring": {"enabled": True}}), "PrometheusRule")["spec"]


def test_they_see_no_series_of_others():
    for expr in (rule["expr"] for group in rules()["groups"] for rule in group["rules"]):
        selectors = re.findall(r"\b(?:up\b|baton[_:][a-z0-9_:]+)(\{[^}]*\})?", expr)
        assert selectors and all(each.startswith('{namespace="llm"') for each in selectors), expr


SERIES = {
    'up{job="baton-gateway",namespace="other"}': "1x40",
    'up{job="baton-decode",namespace="llm"}': "1x40",
    'baton_requests_running{job="baton-gateway",instance="h",namespace="other"}': "5x40",
    'baton_requests_running{job="baton-gateway",instance="g",namespace="llm"}': "0x40",
    'baton_sequences_running{job="baton-decode",instance="d",namespace="llm"}': "0x40",
    'baton_sequences_waiting{job="baton-decode",instance="d",namespace="llm"}': "0x40",
    'baton_kv_blocks{job="baton-decode",instance="d",namespace="llm",holder="leased"}': "3x40",
}
FIRING = (
    'ALERTS{alertname="BatonRoleGone",alertstate="firing",job="baton-gateway",namespace="llm",severity="page"}',
    'ALERTS{alertname="BatonKVLeak",alertstate="firing",instance="d",job="baton-decode",namespace="llm",severity="ticket"}',
)


@pytest.mark.long
def test_what_lives_elsewhere_hides_nothing(tmp_path):
    """The other release has a gateway, and it is busy."""
    (tmp_path / "rules.yml").write_text(yaml.safe_dump(rules()))
    asked = {
        "expr": 'ALERTS{alertstate="firing"}',
        "eval_time": "5m",
        "exp_samples": [{"labels": alert, "value": 1} for alert in FIRING],
    }
    given = [{"series": name, "values": values} for name, values in SERIES.items()]
    tests = [{"interval": "15s", "input_series": given, "promql_expr_test": [asked]}]
    test = {"rule_files": ["rules.yml"], "evaluation_interval": "15s", "tests": tests}
    (tmp_path / "test.yml").write_text(yaml.safe_dump(test))
    promtool("test", "rules", tmp_path / "test.yml")
