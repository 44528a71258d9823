"""What a gateway's meters say."""

from prometheus_client.parser import text_string_to_metric_families as classic

from gateway.observe.meters import GatewayMeters


def samples(meters: GatewayMeters) -> dict[tuple, float]:
    text = meters.exposition().body.decode()
    return {
        (sample.name, *(value for name, value in sorted(sample.labels.items()) if name != "model_name")): sample.value
        for family in classic(text)
        for sample in family.samples
    }
