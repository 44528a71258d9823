"""The gateway's word on the fleet, for `baton doctor` and other operators' tools."""

import os
from urllib.parse import urlsplit

from baton.service.clock import now
from baton.v1 import fleet_pb2 as pb
from gateway.fleet.registry import Registry
from gateway.observe.recent_requests import Journal
from gateway.queue.admission import Lines

SERVICE_NAME = "baton.v1.Fleet"


class FleetService:
    """`redis_url` None: the prefix index is embedded. `redis_down()` says why the index is not in use, or nothing."""

    def __init__(self, registry: Registry, journal: Journal, lines: Lines, redis_url: str | None, redis_down):
        self._registry, self._journal, self._lines = registry, journal, lines
        self._redis_url = without_password(redis_url) if redis_url else ""
        self._redis_down = redis_down

    async def ListWorkers(self, request: pb.ListWorkersRequest, context) -> pb.ListWorkersResponse:
        return self.workers()

    async def ListRequests(self, request: pb.ListRequestsRequest, context) -> pb.ListRequestsResponse:
        return self.requests(request)

    def requests(self, request: pb.ListRequestsRequest) -> pb.ListRequestsResponse:
        return self._journal.listed(request, len(self._lines))

    def workers(self) -> pb.ListWorkersResponse:
        """All that stand in the lists, whatever their state."""
        registry = self._registry
        answer = pb.ListWorkersResponse(
            not_ready=registry.not_ready() or "",
            redis_url=self._redis_url,
            redis_down=self._redis_down(),
            collector=os.environ.get("OTEL_EXPORTER_OTLP_ENDPOINT", ""),
        )
        for role, links in (("prefill", registry.prefill), ("decode", registry.decode)):
            for link in links:
                view = answer.workers.add(
                    address=link.address, role=role, state=link.state.value, reason=link.reason, hello=link.hello,
                    load=link.load, num_legs=len(link.legs),
                )  # fmt: skip
                if link.hello is not None:
                    view.breaker = link.breaker.state.value
                    view.breaker_retry_s = max(0.0, link.breaker.retry_at - now())
                if clock := link.clock:
                    view.clock_offset_s, view.clock_error_s = clock
        return answer


def without_password(url: str) -> str:
    """The URL with user and password left out."""
    parts = urlsplit(url)
    return parts._replace(netloc=parts.netloc.rpartition("@")[2]).geturl()
