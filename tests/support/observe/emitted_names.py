"""Read from the source the metrics, spans, events and attributes that the code emits."""

import ast
import re
from collections.abc import Iterator
from typing import NamedTuple

from baton.sampling_params import SAMPLING_PARAMS
from tests.support.process import ROOT

METERS = (
    "gateway/observe/meters.py", "gateway/observe/gauges.py", "baton/worker/observe/meters.py",
    "baton/worker/observe/gpu_health.py",
)  # fmt: skip
OF_ALL = "baton/service/observe/process_gauges.py"
SPANS = ("gateway/observe/request_trace.py", "baton/worker/observe/spans.py", "baton/service/observe/span_exporter.py")
_KINDS = {"histogram": 3, "tally": 3, "counter": 2, "Count": 3, "Gauge": 3}  # call -> where its labels begin
_SUFFIXES = {"histogram": ("_bucket", "_sum", "_count"), "counter": ("_total",), "Gauge": ("",)}


class Metric(NamedTuple):
    name: str  # counters with their _total
    kind: str  # histogram | counter | gauge
    text: str
    labels: tuple[str, ...]  # beside model_name
    where: str  # gateway | worker

    @property
    def series(self) -> tuple[str, ...]:
        kind = "Gauge" if self.kind == "gauge" else self.kind
        return tuple(self.name.removesuffix("_total") + suffix for suffix in _SUFFIXES[kind])


def metrics() -> list[Metric]:
    """Return all of both rooms, in the order of the code; one that both have is there twice."""
    own = [
        metric for path in METERS for metric in _metrics_of(path, "gateway" if path.startswith("gateway") else "worker")
    ]
    return own + [metric for where in ("gateway", "worker") for metric in _metrics_of(OF_ALL, where)]


def _metrics_of(path: str, where: str) -> Iterator[Metric]:
    for node in ast.walk(ast.parse((ROOT / path).read_text())):
        if isinstance(node, ast.Call) and (call := _called(node)) in _KINDS and node.args:
            name, text = (ast.literal_eval(argument) for argument in node.args[:2])
            labels = tuple(ast.literal_eval(argument) for argument in node.args[_KINDS[call] :])
            kind = {"tally": "histogram", "Count": "counter"}.get(call, call.lower())
            full = f"{name}_total" if kind == "counter" else name
            yield Metric(full, kind, text, labels, where)


def _called(node: ast.Call) -> str:
    return node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")


def constants(*paths: str) -> set[str]:
    """Return all strings of these files, docstrings aside; of f-strings what comes before the first value, and `*`."""
    found = set()
    for path in paths:
        tree = ast.parse((ROOT / path).read_text())
        parts = {id(part) for node in ast.walk(tree) if isinstance(node, ast.JoinedStr) for part in node.values}
        for node in ast.walk(tree):
            if isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in parts:
                found.add(node.value)
            elif isinstance(node, ast.JoinedStr) and isinstance(node.values[0], ast.Constant):
                found.add(f"{node.values[0].value}*")
    return found


def attributes() -> set[str]:
    """Return names of span and event attributes."""
    found = {name for name in constants(*SPANS) if re.fullmatch(r"(gen_ai|baton|error|rpc)\.[a-z_.]+\*?", name)}
    found.remove("gen_ai.request.*")
    return found | {f"gen_ai.request.{name}" for name, param in SAMPLING_PARAMS.items() if param.in_traces}


def span_names() -> set[str]:
    """Return names that are written out; the root's is made of operation and model."""
    found = set()
    for path in SPANS[:2]:
        for node in ast.walk(ast.parse((ROOT / path).read_text())):
            if isinstance(node, ast.Call) and _called(node) in ("_emit_span", "_emit_child"):
                names = (arg.value for arg in node.args[:2] if isinstance(arg, ast.Constant))
                found.update(name for name in names if isinstance(name, str))
    return found


def event_names() -> set[str]:
    return {
        node.args[0].value
        for path in SPANS[:2]
        for node in ast.walk(ast.parse((ROOT / path).read_text()))
        if isinstance(node, ast.Call) and _called(node) == "SpanEvent"
    }
