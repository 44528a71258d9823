"""The rules and dashboards that Prometheus and Grafana are given."""

import json
from pathlib import Path

import yaml

from tests.support.process import ROOT

DEPLOY = ROOT / "deploy"
RULES = sorted((DEPLOY / "prometheus" / "rules").glob("*.yml"))
DASHBOARDS = sorted((DEPLOY / "grafana" / "dashboards").glob("*.json"))
GROUPS = [group for path in RULES for group in yaml.safe_load(path.read_text())["groups"]]
ALL_RULES = [rule for group in GROUPS for rule in group["rules"]]


def panels(path: Path) -> list[dict]:
    """Return the panels of a dashboard, its headings aside."""
    return [panel for panel in json.loads(path.read_text())["panels"] if panel["type"] != "row"]
