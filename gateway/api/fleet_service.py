"""Serve baton.v1.Fleet: workers and requests as this gateway sees them, for `baton doctor` and other tools."""

import grpc

from baton.service.clock import now
from baton.service.net.collector import collector_endpoint
from baton.v1 import fleet_pb2 as pb
from gateway.catalog.catalog import Catalog
from gateway.catalog.model_version import ModelVersion
from gateway.fleet.registry import Registry
from gateway.observe.recent_requests import RecentRequests
from gateway.prefix.prefix_index import PrefixIndex

SERVICE_NAME = "baton.v1.Fleet"


class FleetService:
    """The calls by which operators look at workers and requests, and add and remove models."""

    def __init__(
        self,
        registry: Registry,
        catalog: Catalog,
        recent: RecentRequests,
        index: PrefixIndex,
        redis_url: str | None,
    ):
        """`redis_url`: the address without its password; None: the prefix index is in this process."""
        self._registry, self._catalog, self._recent, self._index = registry, catalog, recent, index
        self._redis_url = redis_url or ""

    async def ListWorkers(self, request: pb.ListWorkersRequest, context) -> pb.ListWorkersResponse:
        """Return all workers in any state, and the models."""
        return self.workers()

    async def ListRequests(self, request: pb.ListRequestsRequest, context) -> pb.ListRequestsResponse:
        """Return running requests, and the last that have ended."""
        return self.requests(request)

    async def AddModel(self, request: pb.AddModelRequest, context: grpc.aio.ServicerContext) -> pb.AddModelResponse:
        """Serve another model, or another version of a model that is served. Raises BatonError."""
        await self._catalog.add(request.name, request.path, request.identity)
        return pb.AddModelResponse()

    async def RemoveModel(
        self, request: pb.RemoveModelRequest, context: grpc.aio.ServicerContext
    ) -> pb.RemoveModelResponse:
        """Stop serving a model; return how many of its requests still run. Raises BatonError."""
        return pb.RemoveModelResponse(num_running=self._catalog.remove(request.name))

    def requests(self, request: pb.ListRequestsRequest) -> pb.ListRequestsResponse:
        """Return running requests, and the last that have ended."""
        num_waiting = sum(len(version.pipeline.queues) for version in self._catalog.versions)
        return self._recent.listed(request, num_waiting)

    def workers(self) -> pb.ListWorkersResponse:
        """Return all workers in any state, and the models."""
        registry = self._registry
        answer = pb.ListWorkersResponse(
            not_ready=registry.not_ready() or "",
            redis_url=self._redis_url,
            redis_down=self._index.down,
            collector=collector_endpoint("TRACES"),
            models=map(self._model, self._catalog.versions),
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
                if fleet := registry.fleet_of(link):
                    view.model = fleet.name
                if link.hello is not None:
                    view.breaker = link.breaker.state.value
                    view.breaker_retry_s = max(0.0, link.breaker.retry_at - now())
                if offset := link.clock.offset:
                    view.clock_offset_s, view.clock_error_s = offset
        return answer

    def _model(self, version: ModelVersion) -> pb.ModelView:
        fleet, reason = version.fleet, self._registry.not_ready_of(version.fleet)
        return pb.ModelView(
            name=version.name,
            identity=fleet.last_identity,
            state="retired" if fleet.is_retired else "waiting" if reason else "serving",
            reason=reason or "",
            num_running=version.num_running,
            num_waiting=len(version.pipeline.queues),
            num_prefill=len(fleet.candidates.serving("prefill")),
            num_decode=len(fleet.candidates.serving("decode")),
        )
