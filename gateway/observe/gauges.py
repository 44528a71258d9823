"""Gauges of a gateway, read at each scrape: its requests, workers and prefix index, and the calls its guard denied."""

from collections.abc import Mapping

from baton.service.observe.metrics import Count, Gauge
from gateway.fleet.registry import Registry
from gateway.link.worker_breaker import BreakerState
from gateway.link.worker_link import LinkState
from gateway.observe.recent_requests import RecentRequests
from gateway.prefix.prefix_index import PrefixIndex
from gateway.queue.admission import WaitingQueues


def request_gauges(recent: RecentRequests, queues: WaitingQueues) -> list[Gauge]:
    """Return gauges of the requests in the gateway."""
    return [
        Gauge("baton_running", "requests in the gateway", lambda: recent.num_running),
        Gauge("baton_waiting", "requests in the gateway's queues", lambda: len(queues)),
    ]


def fleet_gauges(registry: Registry, index: PrefixIndex) -> list[Gauge]:
    """Return gauges of the workers, and of the index of what they hold."""

    def workers() -> dict[str, int]:
        return {state.value: sum(link.state is state for link in registry.links) for state in LinkState}

    def breakers() -> dict[str, int]:
        links = [link for link in registry.links if link.hello is not None]
        return {state.value: sum(link.breaker.state is state for link in links) for state in BreakerState}

    def clock_offsets() -> dict[str, float]:
        return {link.address: clock.offset_s for link in registry.links if (clock := link.clock)}

    def clock_errors() -> dict[str, float]:
        return {link.address: clock.error_s for link in registry.links if (clock := link.clock)}

    def loop_delays() -> dict[str, float]:
        return dict(zip(("core", "busy"), registry.loop_watch.delay, strict=True))

    return [
        Gauge(
            "baton_event_loop_delay_seconds",
            "mean delay of the event loop, for want of a core and for its own work",
            loop_delays,
            "cause",
        ),
        Gauge("baton_index_up", "1 while the prefix index answers", lambda: int(not index.down)),
        Gauge("baton_workers", "workers as this gateway sees them", workers, "state"),
        Gauge("baton_worker_breakers", "workers by the state of their circuit breaker", breakers, "state"),
        Gauge("baton_clock_offset_seconds", "offset of a worker's clock from this gateway's", clock_offsets, "worker"),
        Gauge("baton_clock_error_seconds", "error bound of that offset", clock_errors, "worker"),
    ]


def denied_count(num_denied: Mapping[tuple[str, str], int]) -> Count:
    """Return the counter of denied calls. `num_denied`: by (method, reason), as a guard counts them."""
    return Count("baton_denied", "denied calls", lambda: num_denied, "method", "reason")
