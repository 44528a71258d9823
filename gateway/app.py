"""The application: a gateway with its ports, pipelines, sessions with workers, health and admin pages."""

import asyncio
import gc
import logging
import os
from collections.abc import Sequence
from functools import partial

from baton import tasks
from baton.addresses import host_of
from baton.service import heap, progress
from baton.service.logs import fields
from baton.service.net import server as grpc_server
from baton.service.net.admin import Admin
from baton.service.net.host_names import HostNames
from baton.service.net.http_server import HttpServer, open_http
from baton.service.net.server import Health
from baton.service.observe import genai_metrics, telemetry
from baton.service.observe.process_gauges import process_gauges
from baton.service.security.exposure import is_loopback
from baton.service.settings import SettingsError
from baton.v1 import fleet_pb2_grpc, worker_pb2_grpc
from gateway.api import dashboard
from gateway.api.fleet_service import SERVICE_NAME as FLEET_NAME
from gateway.api.fleet_service import FleetService
from gateway.api.ports import Ports, open_ports
from gateway.api.registration_service import RegistrationService
from gateway.api.request_handler import RequestHandler
from gateway.api.servicer import SERVICE_NAME, InferenceService
from gateway.catalog.catalog import Catalog
from gateway.catalog.version_factory import VersionFactory
from gateway.config.settings import GatewaySettings
from gateway.fleet.registry import Registry
from gateway.model.model_file import read_model
from gateway.model.model_folder import ModelFolder
from gateway.observe import access_log
from gateway.observe.gauges import denied_count, fleet_gauges, request_gauges
from gateway.observe.meters import GatewayMeters
from gateway.observe.recent_requests import RecentRequests
from gateway.orchestration.machine import RequestMachine
from gateway.orchestration.pipeline import RecordItl
from gateway.orchestration.states import RequestEvent
from gateway.prefix.cluster_secret import NO_SECRET, fingerprint, read_secret
from gateway.prefix.memory_index import MemoryIndex
from gateway.prefix.prefix_index import PrefixIndex, SecretDiffers
from gateway.queue.admission import AdmissionControl
from gateway.queue.quotas import Quotas
from gateway.request.request_record import RequestRecord
from gateway.store.redis_url import without_password

_STOP_GRACE_S = 1.0
# New objects after which the garbage collector looks for cycles. Every request makes hundreds of objects, which live as
# long as the request and are in no cycle: at Python's default of 700 the collector took a tenth of a busy gateway's
# time. But gRPC leaves cycles behind each call: at 50,000 a gateway that had refused 28,000 calls took 217 MiB and kept
# growing; at 2,000 it stayed at 92 MiB.
_COLLECT_AT = 2_000

log = logging.getLogger(__name__)


async def serve(settings: GatewaySettings, stop: asyncio.Event) -> int:
    """Serve until `stop` is set, then drain and return 0. Raises SettingsError and ListenError, each with one line."""
    try:
        quotas = Quotas.read(settings.quotas)
    except ValueError as error:
        raise SettingsError(f"--quotas {error}") from None
    ports = open_ports(settings, quotas)
    with progress.phase("gateway", f"reading the tokenizer of {settings.model}"):
        folders = [read_model(path, name or settings.served_model_name) for name, path in settings.models.items()]
    gateway = Gateway(settings, folders, ports, quotas)
    telemetry.setup("baton-gateway")
    genai_metrics.setup("baton-gateway")
    gc.collect()
    gc.freeze()  # objects that exist now live as long as the process
    gc.set_threshold(_COLLECT_AT, 10, 10)
    try:
        return await gateway.run(ports.port, stop, ports.fleet_port)
    finally:
        telemetry.shut_down()
        genai_metrics.shut_down(_STOP_GRACE_S)


class Gateway:
    """All parts of one gateway, made in the order in which they need each other. The constructor raises
    SettingsError."""

    def __init__(self, settings: GatewaySettings, folders: Sequence[ModelFolder], ports: Ports, quotas: Quotas):
        self._settings, self._quotas = settings, quotas
        self._server, self._guard = ports.server, ports.guard
        self._changed = asyncio.Event()
        self.index = _make_index(settings)
        self._secret = read_secret(settings.cluster_secret) if settings.cluster_secret else None
        self.registry = Registry(settings, self.index, self._secret, self._on_fleet_change)
        self._admission = AdmissionControl(settings.max_concurrent_requests, quotas)
        self._running: dict[str, RequestMachine] = {}  # key_id -> request, over all models
        self._versions = VersionFactory(
            settings, self.registry, self.index, self._admission, self._running, self._itl_recorder_for
        )
        self.catalog = Catalog(self._versions.add, self._versions.drop, settings.model_root)
        self.recent = RecentRequests(self.registry.worker_started_at)
        gauges = request_gauges(self.recent, self.catalog) + fleet_gauges(self.registry, self.index)
        whose = folders[0].name if len(folders) == 1 else ""
        gauges += process_gauges(settings.tls)
        self.meters = GatewayMeters(whose, self.registry.slo_classes, [*gauges, denied_count(ports.guard.num_denied)])
        self.catalog.versions += [self._versions.make(folder) for folder in folders]
        self.handler = RequestHandler(
            self.catalog,
            self.registry,
            self._admission,
            settings,
            self.recent.began,
            self._on_request_end,
            ports.guard.pace_refusal,
        )
        self._secret_checked = asyncio.Event()
        self.http: HttpServer | None = None  # the HTTP API, once it is open
        self._ready_line = ""  # emptied once it is printed
        self._closing: asyncio.Task | None = None  # closes the port while the gateway drains

    async def run(self, port: int, stop: asyncio.Event, fleet_port: int | None = None) -> int:
        """Serve until `stop` is set, then drain and return 0. Raises SettingsError.

        `port` is the port to which the server is bound, `fleet_port` the one for callers with certificates."""
        settings = self._settings
        for version in self.catalog.versions:
            await self._versions.make_public(version)
        fleet, health = self._add_services()
        admin = Admin(
            self.readiness,
            {"/metrics": self.meters.page, **dashboard.pages(fleet, settings.trace_url, self._api_url)},
            settings.admin_hosts,
        )
        admin_port = await admin.start(settings.admin)
        self.http = self._open_http(admin_port)
        await grpc_server.start(self._server)
        if not settings.decode_workers:
            log.info("no --decode-workers: waiting for workers that register %s", fields(at=fleet_port or port))
        self._ready_line = self._ready_text(port, fleet_port, admin_port)
        watching = tasks.start("readiness", partial(self._watch, health), fatal=(SettingsError,))
        running = [watching, *self._start_tasks()]
        try:
            stopping = asyncio.create_task(stop.wait(), name="stop")
            await asyncio.wait([watching, stopping], return_when=asyncio.FIRST_COMPLETED)
            if not stop.is_set():
                stopping.cancel()
                await watching  # which raises why
            await self._drain(health)
            return 0
        finally:
            await self._close(admin, running)

    def _add_services(self) -> tuple[FleetService, Health]:
        """Add the services for clients, operators and workers to the server; the health service says not serving."""
        settings, server = self._settings, self._server
        InferenceService(self.handler).add_to(server)
        shown_url = without_password(settings.redis) if settings.redis else None
        fleet = FleetService(self.registry, self.catalog, self.recent, self.index, shown_url)
        fleet_pb2_grpc.add_FleetServicer_to_server(fleet, server)
        worker_pb2_grpc.add_RegistrationServicer_to_server(RegistrationService(self.registry.registered), server)
        health = Health(server)
        health.set(SERVICE_NAME, False)
        if settings.has_reflection(settings.is_loopback and settings.credentials is None):
            grpc_server.enable_reflection(server, [SERVICE_NAME, FLEET_NAME])
        return fleet, health

    def _ready_text(self, port: int, fleet_port: int | None, admin_port: int) -> str:
        """Return the line that says at which addresses the gateway is reached."""
        settings = self._settings
        grpc_address, admin_address = f"{host_of(settings.listen)}:{port}", f"{host_of(settings.admin)}:{admin_port}"
        fleet_address = f" fleet={host_of(settings.fleet_listen)}:{fleet_port}" if fleet_port else ""
        http_address = f" http={host_of(settings.http or '')}:{self.http.port}" if self.http else ""
        return f"ready grpc={grpc_address}{http_address}{fleet_address} admin={admin_address} pid={os.getpid()}"

    def _start_tasks(self) -> list[asyncio.Task]:
        """Start and return the tasks that run as long as the gateway."""
        running = [tasks.start("registry", self.registry.run), tasks.start("heap", heap.keep_trimmed)]
        if self._settings.redis:
            running.append(tasks.start("redis", self._keep_index))
        if self._settings.redis and self._settings.quotas:
            running.append(tasks.start("usage", self._share_usage))
        return running

    async def _close(self, admin: Admin, running: Sequence[asyncio.Task]) -> None:
        """Stop the servers, the models and the background tasks."""
        if self.http:
            await self.http.stop()
        await self._server.stop(_STOP_GRACE_S)
        await admin.stop()
        for version in self.catalog.versions:
            version.close()
        for task in running:
            task.cancel()
        await asyncio.gather(*running, return_exceptions=True)

    def _api_url(self, host: str) -> str | None:
        """Return the URL of the HTTP API if the admin page, which a browser opened at `host`, may call it, else None.

        It may if both ports are reached from this host only, or if --http-origins lets pages call the API."""
        settings = self._settings
        if self.http is None or not (settings.http_origins or self._pages_are_here):
            return None
        return f"{'https' if settings.tls else 'http'}://{host}:{self.http.port}"

    @property
    def _pages_are_here(self) -> bool:
        """Whether the HTTP API and the admin pages are both reached from this host only."""
        return is_loopback(self._settings.http or "") and is_loopback(self._settings.admin)

    def _open_http(self, admin_port: int) -> HttpServer | None:
        """Start the HTTP API if it is configured. Raises ListenError."""
        settings = self._settings
        if settings.http is None:
            return None
        from gateway.http.app import make_app, refuse_head

        names = None
        if settings.credentials is None:
            names = HostNames((host_of(settings.http), *settings.admin_hosts))
        hosts = ("127.0.0.1", "localhost", "[::1]") if self._pages_are_here else ()
        origins = (*settings.http_origins, *(f"http://{host}:{admin_port}" for host in hosts))
        app = make_app(self.handler, self._guard, origins, names)
        server = open_http(settings.http, app, refuse_head, settings.tls)
        server.start()
        return server

    def readiness(self) -> tuple[bool, dict]:
        """Return whether requests can be served, and the data of the readiness page with the state of each worker."""
        reason = self.handler.not_ready()
        workers = {
            link.address: {"state": link.state.value, "reason": link.reason, "num_legs": len(link.legs)}
            for link in self.registry.links
        }
        return reason is None, {"ready": reason is None, "reason": reason or "", "workers": workers}

    def _itl_recorder_for(self, record: RequestRecord) -> RecordItl:
        return self.meters.itl_recorder_for(record)  # not bound earlier: the meters are made after the models

    def _on_request_end(self, record: RequestRecord, error: BaseException | None) -> None:
        self.meters.ended(record, error)
        self.recent.ended(record, error)
        access_log.ended(record, error)

    def _on_fleet_change(self) -> None:
        self.catalog.note_change()
        for version in self.catalog.versions:
            version.note_change()
        self._changed.set()

    async def _watch(self, health: Health) -> None:
        """Set the health service whenever readiness changes, and print the ready line once. Raises SettingsError."""
        await self._check_secret()
        while True:
            reason = self.registry.not_ready()
            serving = reason is None and not self.handler.is_draining
            for name in ("", SERVICE_NAME):
                health.set(name, serving)
            if serving and self._ready_line:
                names = ",".join(version.name for version in self.catalog.current)
                log.info("serving %s", fields(model=names, split=self._settings.split))
                print(self._ready_line, flush=True)
                self._ready_line = ""
            await self._changed.wait()
            self._changed.clear()

    async def _check_secret(self) -> None:
        """Check that other gateways have the same secret, or none as this one. Raises SettingsError."""
        try:
            await self.index.check_secret(fingerprint(self._secret or NO_SECRET))
        except SecretDiffers as error:
            raise SettingsError(f"--cluster-secret: {error}") from None
        self._secret_checked.set()

    async def _keep_index(self) -> None:
        await self._secret_checked.wait()
        await self.index.run()

    async def _share_usage(self) -> None:
        from gateway.queue.quota_sync import SharedUsage

        await SharedUsage(self._quotas, self._settings.redis, self.registry.instance).run()

    async def _drain(self, health: Health) -> None:
        self.handler.is_draining = True
        health.shut_down()
        log.info("draining %s", fields(running=self.handler.num_running))
        if self.http:
            self.http.drain()
        # Running requests continue. Clients get GOAWAY, so their next call opens a new connection, which a Kubernetes
        # Service leads to another gateway. `run` ends what is left, with a shorter grace period, which wins.
        grace_s = self._settings.drain_grace_s
        self._closing = asyncio.create_task(self._server.stop(grace_s + 2 * _STOP_GRACE_S), name="close the port")
        deadline = asyncio.get_running_loop().time() + grace_s
        while self._is_busy and asyncio.get_running_loop().time() < deadline:
            await asyncio.sleep(0.02)
        if self._running:
            self._give_up()

    @property
    def _is_busy(self) -> bool:
        """Whether requests run or HTTP connections are still answered."""
        return self.handler.num_running > 0 or (self.http is not None and self.http.is_busy)

    def _give_up(self) -> None:
        """End the requests that still run: clients are told how to continue on another gateway, and workers keep the
        sequences."""
        for machine in list(self._running.values()):
            machine.give_up(RequestEvent.GRACE_OVER)
        for link in self.registry.links:
            link.session.hang_up("this gateway is shutting down")


def _make_index(settings: GatewaySettings) -> PrefixIndex:
    if settings.redis is None:
        return MemoryIndex()
    from gateway.prefix.redis_index import RedisIndex

    try:
        return RedisIndex(settings.redis, os.urandom(16))
    except ValueError as error:
        raise SettingsError(f"--redis: {error}") from None
