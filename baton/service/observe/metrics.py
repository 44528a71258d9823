"""Metrics of a process for Prometheus. Each family has the label `model_name` with bounded values: a process with
several models has each family once, with children for each model."""

import asyncio
import copy
import time
import typing
from bisect import bisect_left
from collections.abc import Callable, Iterable, Mapping, Sequence

import prometheus_client
from prometheus_client import CollectorRegistry
from prometheus_client.core import CounterMetricFamily, Exemplar, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.exposition import generate_latest as classic_text
from prometheus_client.openmetrics import exposition as openmetrics
from prometheus_client.utils import floatToGoString
from starlette.responses import Response

from baton.service.net.admin import Page

# The buckets of the GenAI semantic conventions (v1.41), so that both kinds of charts agree.
TTFT_BUCKETS = (0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.3, 0.5, 0.75, 1, 2, 2.5, 5, 7.5, 10)
TPOT_BUCKETS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1, 2.5)
DURATION_BUCKETS = tuple(0.01 * 2**n for n in range(14))
PHASE_BUCKETS = (0.0005, 0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10, 30)
RATIO_BUCKETS = tuple(n / 10 for n in range(11))


class Metrics:
    """The metrics of one model; `page` serves /metrics. A child is made once for each set of label values, and the
    observer keeps it."""

    def __init__(self, model_name: str):
        self.model_name = model_name
        self._registry = CollectorRegistry()
        self._made: dict[str, typing.Any] = {}

    def of(self, model_name: str) -> "Metrics":
        """Return the same families for another model."""
        other = copy.copy(self)
        other.model_name = model_name
        return other

    def histogram(self, name: str, text: str, buckets: Sequence[float], *labels: str) -> "Family[Histogram]":
        return Family(self._once(name, _Histograms, text, labels, buckets=buckets), self.model_name)

    def counter(self, name: str, text: str, *labels: str) -> "Family[prometheus_client.Counter]":
        return Family(self._once(name, prometheus_client.Counter, text, labels), self.model_name)

    def collect(self, *readings: "Gauge | Count") -> None:
        """Expose values that are read at each scrape, and only then."""
        self._registry.register(_Collector(readings, self.model_name))

    def _once(self, name: str, kind: Callable, text: str, labels: Sequence[str], **options):
        if (made := self._made.get(name)) is None:
            made = self._made[name] = kind(name, text, ("model_name", *labels), registry=self._registry, **options)
        return made

    @property
    def page(self) -> Page:
        """Answer a scrape, with exemplars if the client accepts them."""
        return Page(self.exposition, form=lambda request: "openmetrics" in request.headers.get("accept", ""))

    def exposition(self, is_openmetrics: bool = False) -> Response:
        """Return the text of all families; OpenMetrics has exemplars."""
        if is_openmetrics:
            return Response(openmetrics.generate_latest(self._registry), media_type=openmetrics.CONTENT_TYPE_LATEST)
        return Response(classic_text(self._registry), media_type=prometheus_client.CONTENT_TYPE_LATEST)


Child = typing.TypeVar("Child")


class Family(typing.Generic[Child]):
    """A metric of one model: `family(*label_values)` returns the child."""

    def __init__(self, metric, model_name: str):
        self._metric, self._model_name = metric, model_name
        self._children: dict[tuple[str, ...], Child] = {}

    def __call__(self, *values: str) -> Child:
        if (child := self._children.get(values)) is None:
            child = self._children[values] = self._metric.labels(self._model_name, *values)
        return child


class Histogram:
    """A histogram for one thread. An observation takes 0.6 us; prometheus_client's, with lock and exemplar, takes 8,
    and a request has seventeen."""

    def __init__(self, buckets: Sequence[float]):
        self._bounds = tuple(buckets)
        self._counts = [0] * (len(buckets) + 1)
        self._exemplars: list[tuple[int, float, float] | None] = [None] * len(self._counts)
        self._sum = 0.0

    def observe(self, value: float, trace_id: int = 0) -> None:
        """Count a value, with an exemplar unless `trace_id` is 0."""
        index = bisect_left(self._bounds, value)
        self._counts[index] += 1
        self._sum += value
        if trace_id:
            self._exemplars[index] = trace_id, value, time.time()

    def add_to(self, family: HistogramMetricFamily, label_values: Sequence[str]) -> None:
        """Add the observations to a family."""
        total, buckets = 0, []
        bounds = [*map(floatToGoString, self._bounds), "+Inf"]
        for bound, count, exemplar in zip(bounds, self._counts, self._exemplars, strict=True):
            total += count
            shown = exemplar and Exemplar({"trace_id": f"{exemplar[0]:032x}"}, *exemplar[1:])
            buckets.append((bound, total, shown))
        family.add_metric(label_values, buckets, self._sum)


class _Histograms:
    """The histograms of one family, by their label values."""

    def __init__(
        self, name: str, text: str, labels: Sequence[str], registry: CollectorRegistry, buckets: Sequence[float]
    ):
        self._name, self._text, self._labels, self._buckets = name, text, labels, buckets
        self._children: dict[tuple[str, ...], Histogram] = {}
        registry.register(self)

    def labels(self, *values: str) -> Histogram:
        return self._children.setdefault(values, Histogram(self._buckets))

    def collect(self) -> Iterable[HistogramMetricFamily]:
        family = HistogramMetricFamily(self._name, self._text, labels=self._labels)
        for values, histogram in self._children.items():
            histogram.add_to(family, values)
        return [family]


class Gauge:
    """A gauge that is read at each scrape. `read()` returns one number, None to show none, or a mapping from label
    values (tuples if there are several `labels`) to numbers; with `by_model`, a mapping from model names to such
    results."""

    def __init__(self, name: str, text: str, read, *labels: str, by_model: bool = False):
        self.name, self.text, self.read, self.labels, self.by_model = name, text, read, labels, by_model

    def family(self, model_name: str) -> GaugeMetricFamily:
        family = GaugeMetricFamily(self.name, self.text, labels=["model_name", *self.labels])
        value = self.read()
        for model, its_value in (value if self.by_model else {model_name: value}).items():
            for values, number in (its_value if self.labels else {(): its_value}).items():
                if number is not None:
                    family.add_metric([model, *([values] if isinstance(values, str) else values)], number)
        return family


class Count:
    """A counter that other code keeps, counted since this object was made. `read()` returns its value for each tuple of
    `labels`."""

    def __init__(self, name: str, text: str, read: Callable[[], Mapping[tuple[str, ...], float]], *labels: str):
        self.name, self.text, self.read, self.labels = name, text, read, labels
        self._created = time.time()

    def family(self, model_name: str) -> CounterMetricFamily:
        """Return the family to expose now."""
        family = CounterMetricFamily(self.name, self.text, labels=["model_name", *self.labels])
        for values, number in self.read().items():
            family.add_metric([model_name, *values], number, created=self._created)
        return family


def num_tasks() -> int:
    """Return the number of tasks of the running event loop; 0 without a loop."""
    try:
        return len(asyncio.all_tasks())
    except RuntimeError:
        return 0


class _Collector:
    def __init__(self, readings: Iterable[Gauge | Count], model_name: str):
        self._readings, self._model_name = tuple(readings), model_name

    def collect(self) -> Iterable[Metric]:
        return (reading.family(self._model_name) for reading in self._readings)

    def describe(self) -> Iterable[Metric]:
        return (Metric(reading.name, reading.text, "unknown") for reading in self._readings)
