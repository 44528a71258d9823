"""baton.v1.Fleet: workers and requests as this gateway sees them, for `baton doctor` and other tools of operators."""

import os
from urllib.parse import urlsplit

from baton.service.clock import now
from baton.v1 import fleet_pb2 as pb
from gateway.fleet.registry import Registry
from gateway.observe.recent_requests import RecentRequests
from gateway.prefix.prefix_index import PrefixIndex
from gateway.queue.admission import WaitingQueues

SERVICE_NAME = "baton.v1.Fleet"


class FleetService:
    """Say what this gateway sees of its workers and requests."""

    def __init__(
        self,
        registry: Registry,
        recent: RecentRequests,
        queues: WaitingQueues,
        index: PrefixIndex,
        redis_url: str | None,
    ):
        """`redis_url` None: the prefix index is in this process."""
        self._registry, self._recent, self._queues, self._index = registry, recent, queues, index
        self._redis_url = without_password(redis_url) if redis_url else ""

    async def ListWorkers(self, request: pb.ListWorkersRequest, context) -> pb.ListWorkersResponse:
        """Return all workers, whatever their state."""
        return self.workers()

    async def ListRequests(self, request: pb.ListRequestsRequest, context) -> pb.ListRequestsResponse:
        """Return requests that run, and the last that have ended."""
        return self.requests(request)

    def requests(self, request: pb.ListRequestsRequest) -> pb.ListRequestsResponse:
        """Return requests that run, and the last that have ended."""
        return self._recent.listed(request, len(self._queues))

    def workers(self) -> pb.ListWorkersResponse:
        """Return all workers, whatever their state."""
        registry = self._registry
        answer = pb.ListWorkersResponse(
            not_ready=registry.not_ready() or "",
            redis_url=self._redis_url,
            redis_down=self._index.down,
            collector=os.environ.get("OTEL_EXPORTER_OTLP_ENDPOINT", ""),
        )
        for role, links in (("prefill", registry.prefill), ("decode", registry.decode)):
            for link in links:
                view = answer.workers.add(
                    address=link.address,
                    role=role,
                    state=link.state.value,
                    reason=link.reason,
                    hello=link.hello,
                    load=link.load,
                    num_legs=len(link.legs),
                )
                if link.hello is not None:
                    view.breaker = link.breaker.state.value
                    view.breaker_retry_s = max(0.0, link.breaker.retry_at - now())
                if clock := link.clock:
                    view.clock_offset_s, view.clock_error_s = clock
        return answer


def without_password(url: str) -> str:
    """Return the URL without user and password."""
    parts = urlsplit(url)
    return parts._replace(netloc=parts.netloc.rpartition("@")[2]).geturl()
