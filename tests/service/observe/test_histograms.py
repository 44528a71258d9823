"""A histogram of ours reads on the page as prometheus_client's own."""

import prometheus_client
from prometheus_client.openmetrics.parser import text_string_to_metric_families as openmetrics
from prometheus_client.parser import text_string_to_metric_families as classic

from baton.service.observe.metrics import TPOT_BUCKETS, Metrics

VALUES = (0.0, 0.001, 0.0011, 0.02, 0.02, 3.0)


def samples(text: str, parse, name: str) -> dict[tuple, float]:
    found = [sample for family in parse(text) for sample in family.samples if sample.name.startswith(name)]
    return {
        (each.name.removeprefix(name), *sorted(each.labels.items())): each.value
        for each in found
        if not each.name.endswith("_created")
    }


def test_a_histogram_counts_as_that_of_the_library():
    metrics = Metrics("tiny")
    labels = dict(labelnames=["model_name", "part"], registry=metrics._registry, buckets=TPOT_BUCKETS)
    theirs = prometheus_client.Histogram("theirs", "text", **labels).labels("tiny", "a")
    ours = metrics.histogram("ours", "text", TPOT_BUCKETS, "part")("a")
    for value in VALUES:
        ours.observe(value)
        theirs.observe(value)
    for is_openmetrics, parse in ((False, classic), (True, openmetrics)):
        text = metrics.exposition(is_openmetrics).body.decode()
        seen = samples(text, parse, "ours")
        assert seen == samples(text, parse, "theirs")
        assert sum(key[0] == "_bucket" for key in seen) == len(TPOT_BUCKETS) + 1


def test_the_last_trace_of_a_bucket_is_its_exemplar():
    metrics = Metrics("tiny")
    histogram = metrics.histogram("ours", "text", (0.1, 1.0))()
    for value, trace_id in ((0.05, 1), (0.07, 2), (0.5, 3), (0.6, 0)):
        histogram.observe(value, trace_id)
    page = metrics.exposition(is_openmetrics=True).body.decode()
    told = {
        sample.labels["le"]: (sample.exemplar.labels["trace_id"], sample.exemplar.value)
        for family in openmetrics(page)
        for sample in family.samples
        if sample.exemplar
    }
    assert told == {"0.1": (f"{2:032x}", 0.07), "1.0": (f"{3:032x}", 0.5)}
