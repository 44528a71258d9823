"""Gauges of a gateway, read at each scrape: its requests, workers and prefix index, and the calls that its guard
denied."""

from collections import Counter
from collections.abc import Mapping

from baton.service.observe.metrics import Count, Gauge
from gateway.catalog.catalog import Catalog
from gateway.fleet.registry import Registry
from gateway.link.worker_breaker import BreakerState
from gateway.link.worker_link import LinkState, WorkerLink
from gateway.observe.recent_requests import RecentRequests
from gateway.prefix.prefix_index import PrefixIndex


def request_gauges(recent: RecentRequests, catalog: Catalog) -> list[Gauge]:
    """Return gauges of the requests in the gateway, by model."""

    def running() -> dict[str, int]:
        return dict.fromkeys((version.name for version in catalog.versions), 0) | recent.num_running_by_model

    def waiting() -> dict[str, int]:
        found = Counter[str]()
        for version in catalog.versions:
            found[version.name] += len(version.pipeline.queues)
        return found

    return [
        Gauge("baton_requests_running", "requests in the gateway", running, by_model=True),
        Gauge("baton_requests_waiting", "requests in the gateway's queues", waiting, by_model=True),
    ]


def fleet_gauges(registry: Registry, index: PrefixIndex) -> list[Gauge]:
    """Return gauges of the workers and of the prefix index. A worker that has not said what it serves counts under no
    model's name, or under the only one."""

    def links() -> dict[str, list[WorkerLink]]:
        names = {fleet.name: list[WorkerLink]() for fleet in registry.fleets}
        unknown = next(iter(names)) if len(names) == 1 else ""
        for link in registry.links:
            fleet = registry.fleet_of(link)
            names.setdefault(fleet.name if fleet else unknown, []).append(link)
        return names

    def ready() -> dict[str, int]:
        found = Counter[str]()
        for fleet in (each for each in registry.fleets if not each.is_retired):
            found[fleet.name] |= fleet.not_ready() is None
        return found

    def workers() -> dict[str, dict[str, int]]:
        return {
            name: {state.value: sum(link.state is state for link in its_links) for state in LinkState}
            for name, its_links in links().items()
        }

    def breakers() -> dict[str, dict[str, int]]:
        known = {name: [link for link in its_links if link.hello is not None] for name, its_links in links().items()}
        return {
            name: {state.value: sum(link.breaker.state is state for link in its_links) for state in BreakerState}
            for name, its_links in known.items()
        }

    def clock_offsets() -> dict[str, float]:
        return {link.address: offset.offset_s for link in registry.links if (offset := link.clock.offset)}

    def clock_errors() -> dict[str, float]:
        return {link.address: offset.error_s for link in registry.links if (offset := link.clock.offset)}

    def loop_delays() -> dict[str, float]:
        return dict(zip(("core", "busy"), registry.loop_watch.delay, strict=True))

    return [
        Gauge(
            "baton_event_loop_delay_seconds",
            "mean delay of the event loop, for want of a core and for its own work",
            loop_delays,
            "cause",
        ),
        Gauge("baton_ready", "1 while workers can serve a request for the model", ready, by_model=True),
        Gauge("baton_index_up", "1 while the prefix index answers", lambda: int(not index.down)),
        Gauge("baton_workers", "workers as this gateway sees them", workers, "state", by_model=True),
        Gauge(
            "baton_worker_breakers", "workers by the state of their circuit breaker", breakers, "state", by_model=True
        ),
        Gauge("baton_clock_offset_seconds", "offset of a worker's clock from this gateway's", clock_offsets, "worker"),
        Gauge("baton_clock_error_seconds", "error bound of that offset", clock_errors, "worker"),
    ]


def denied_count(num_denied: Mapping[tuple[str, str], int]) -> Count:
    """Return the counter of denied calls. `num_denied`: a guard's counts by (method, reason)."""
    return Count("baton_denied", "denied calls", lambda: num_denied, "method", "reason")
