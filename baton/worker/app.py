"""Put a worker together: the engine and its loop, KV transfer over the engine's pool, sessions, and one gRPC server."""

import asyncio
import logging
import os
from collections.abc import AsyncIterator, Coroutine
from contextlib import AsyncExitStack, asynccontextmanager, closing
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import grpc
import torch

from baton import tasks
from baton.addresses import host_of
from baton.engine import native
from baton.engine.core import cpu
from baton.engine.core.config import EngineConfig
from baton.engine.core.device import find_device, unfit
from baton.engine.core.shared_cores import SharedCores
from baton.engine.engine import Engine
from baton.engine.gpu_ranks.build import devices_for
from baton.engine.loop import EngineLoop
from baton.engine.models.registry import read_spec
from baton.engine.start_line import start_details, start_line
from baton.protocol import STAYS_AWAY
from baton.service import progress
from baton.service.fatal import (
    exit_at_once,
    exit_for_broken_engine,
    exit_for_lost_device,
    exit_for_lost_rank,
    exit_if_out_of_memory,
)
from baton.service.net import server as grpc_server
from baton.service.net.server import Health
from baton.service.observe import telemetry
from baton.service.security.access import Access
from baton.service.security.exposure import is_loopback
from baton.service.security.guard import Guard
from baton.v1 import worker_pb2 as pb
from baton.v1 import worker_pb2_grpc
from baton.worker.hello import make_hello, new_identity, tokenizer_digest
from baton.worker.kv.pool_memory import PoolMemory
from baton.worker.kv_endpoints import KVEndpoints
from baton.worker.legs.leg import Leg
from baton.worker.observe.admin_port import AdminPort, open_admin
from baton.worker.observe.gpu_health import watch_gpus
from baton.worker.observe.meters import WorkerMeters
from baton.worker.observe.reports import SERVICE_NAME, Reports
from baton.worker.observe.roofline import Roofline, full_step_s, of_engine
from baton.worker.observe.spans import Spans
from baton.worker.observe.tables import Tables
from baton.worker.ranks import device
from baton.worker.ranks.listener import RankListener
from baton.worker.registration import register
from baton.worker.session.adapters import LiveAdapters
from baton.worker.session.drain import Drain
from baton.worker.session.leg_dispatcher import LegDispatcher
from baton.worker.session.leg_machine import LegMachine, Table
from baton.worker.session.service import WorkerService
from baton.worker.session.sessions import Sessions
from baton.worker.settings import WorkerSettings
from baton.worker.wire.thread_bridge import ThreadBridge
from kvtransfer.memory.cuda_runtime import gpu_refusal

STOP_GRACE_S = 1.0
DRIVER = Path("/proc/driver/nvidia/version")

log = logging.getLogger(__name__)


def load_engine(
    config: EngineConfig,
    memory: PoolMemory,
    rank_listener: RankListener | None = None,
    cores: SharedCores | None = None,
) -> Engine:
    """Return the engine with its model loaded. `rank_listener` accepts ranks of other hosts; `cores`: the cores shared
    with other workers. Raises ModelError for a folder that cannot be served, ValueError for an option that does not fit
    the model."""
    if cores is not None:
        torch.set_num_threads(cores.share)
    engine = Engine.load(
        config, memory_for=memory.allocate, gpu_memory_for=memory.allocate_on_gpu, joining=rank_listener,
        rank_program=device.PROGRAM,
    )  # fmt: skip
    if cores is not None and engine.ranks is None:
        engine.runner.threads.share(cores)
    memory.mirror(engine.pool)
    return engine


async def _load_unless_stopped(loading: Coroutine[Any, Any, Engine], stop: asyncio.Event) -> Engine:
    """Return the engine that `loading` loads. If `stop` comes first, end the process: there is nothing to drain yet,
    and the thread that reads a model or waits for ranks ends only with the process."""
    reading, stopping = asyncio.create_task(loading), asyncio.create_task(stop.wait())
    try:
        await asyncio.wait((reading, stopping), return_when=asyncio.FIRST_COMPLETED)
        if not reading.done():
            exit_at_once("told to end before its model was loaded", logging.INFO, 0)
        return reading.result()
    finally:
        stopping.cancel()
        reading.cancel()


@asynccontextmanager
async def sharing_cores(settings: WorkerSettings) -> AsyncIterator[SharedCores | None]:
    """Count this worker, within the block, among those that share this host's cores. Yield None on a GPU, and if the
    number of threads was given."""
    config = settings.engine
    if config.threads is not None or "OMP_NUM_THREADS" in os.environ or find_device(config.device).type != "cpu":
        yield None
        return
    try:
        cores = SharedCores(settings.host_folder)
    except OSError as error:
        log.warning("computes on all cores, whoever else does: %s", error)
        yield None
        return
    with closing(cores):
        yield cores


class BoundServer(NamedTuple):
    """The gRPC server of a worker, bound to `port` and not yet started, and its guard."""

    server: grpc.aio.Server
    port: int
    guard: Guard


def bind_server(settings: WorkerSettings) -> BoundServer:
    """Bind the worker's port. Raises ListenError if it is taken, SettingsError for certificates that cannot be read."""
    tls = settings.tls
    if tls:
        tls.check()
    guard = Guard(is_open=tls is None)
    server = grpc_server.make_server(interceptors=[guard])
    port = grpc_server.bind(server, settings.listen, tls and tls.server(require_certificate=True))
    return BoundServer(server, port, guard)


@asynccontextmanager
async def listening_for_ranks(settings: WorkerSettings) -> AsyncIterator[RankListener | None]:
    """Open the port for ranks of other hosts within the block; yield None if there are none. Raises ListenError."""
    if settings.rank_listen is None:
        yield None
        return
    rank_listener = RankListener(settings.rank_listen, settings.tls, settings.engine.remote_stages)
    await rank_listener.start()
    log.info("waits for %d ranks of other hosts at %s", settings.engine.remote_stages, rank_listener.address)
    try:
        yield rank_listener
    finally:
        await rank_listener.stop()


class Worker:
    """Serve within `async with`. Constructed inside a running event loop.

    `port` and `admin_port` are the ports that it listens on; `service` answers gateways; `engine`, `dispatcher` and
    `sessions` are its parts."""

    def __init__(
        self, settings: WorkerSettings, role: str, table: Table, engine: Engine, memory: PoolMemory, digest: bytes,
        bound: BoundServer, admin: AdminPort, roofline: Roofline | None = None,
    ):  # fmt: skip
        """Connect the parts of a worker; nothing runs yet. `role`: prefill | decode, as told to gateways. `table`: the
        transitions of legs. `digest`: the tokenizer's. `admin`: the port to which this adds its metrics and readiness.
        Without a `roofline` there is no baton_utilisation."""
        self.engine = engine
        self._settings, self._role, self._digest = settings, role, digest
        self._memory, self._bound, self._admin = memory, bound, admin
        self._identity = new_identity(engine)
        self._spans = Spans(engine.model_name)
        self._meters = WorkerMeters(admin.metrics, engine, memory, roofline, bound.guard.num_denied)
        changed = asyncio.Event()
        self._kv = kv = KVEndpoints(engine, memory, self._identity, settings, bound.guard)
        machine = LegMachine(
            table, engine, kv.handoff, kv.intake, on_change=changed.set, on_ended=self._on_ended,
            resume_window_s=settings.resume_window_s,
        )  # fmt: skip
        self.dispatcher = LegDispatcher(machine)
        bridge = ThreadBridge(asyncio.get_running_loop(), self.dispatcher.on_outputs)
        self._loop = EngineLoop(engine, bridge.put, exit_for_lost_device, exit_for_broken_engine)
        self.sessions = Sessions(engine)
        self._drain = Drain(self.dispatcher, self.sessions, settings.drain_grace_s)
        tables = Tables(engine, self.dispatcher, kv.holders, kv.intake, kv.source, self.sessions)
        self._meters.watch(tables)
        self._health = Health(bound.server)
        longest_step_s = full_step_s(engine, roofline) if roofline else 0.0
        self._reports = Reports(
            engine, self._loop, self.dispatcher, self.sessions, self._health, tables, changed, longest_step_s
        )
        self._exits = AsyncExitStack()

    @property
    def port(self) -> int:
        return self._bound.port

    @property
    def admin_port(self) -> int:
        return self._admin.port

    async def __aenter__(self) -> "Worker":
        try:
            await self._start()
        except BaseException:
            await self._exits.aclose()
            raise
        return self

    async def __aexit__(self, *exc) -> None:
        await self._exits.aclose()

    async def drain_when(self, stop: asyncio.Event) -> str:
        """Serve until `stop` or a Drain call. Then refuse new requests, let running ones end or move, and close every
        session. Return the role that this process takes next, or ""."""
        ending = asyncio.create_task(self._drain.end_on(stop))
        try:
            await self._drain.asked.wait()
            await self._drain.run()
        finally:
            ending.cancel()
        return self._drain.next_role

    @property
    def stays_away(self) -> bool:
        """Return whether the last Drain call asked that this worker is not started again."""
        return self._drain.stays_away

    async def _start(self) -> None:
        """Start each part and register its end; ends run in reverse order."""
        exits, server, settings = self._exits, self._bound.server, self._settings
        exits.callback(self._memory.close)
        if (ranks := self.engine.ranks) is not None:
            exits.callback(ranks.close)
            ranks.when_lost(exit_for_lost_rank)
        exits.push_async_callback(self._kv.stop)
        await self._kv.start()
        adapters = self._add_services()
        await adapters.restore()
        exits.callback(self._loop.stop)
        self._loop.start()
        if gpus := exits.enter_context(watch_gpus(_devices_of(self.engine))):
            self._meters.watch_gpus(gpus)
        self._run("reports", self._reports.run, on_failure=exit_if_out_of_memory)
        exits.push_async_callback(server.stop, STOP_GRACE_S)
        exits.callback(self._health.shut_down)
        exits.push_async_callback(self._admin.stop)
        await grpc_server.start(server)
        self._admin.readiness = self._readiness
        self._run("adapters", adapters.catch_up)
        if settings.gateways:
            where = pb.RegisterRequest(address=settings.address_at(self.port), role=self._role)
            access = Access(settings.tls_ca, settings.tls_cert, settings.tls_key)
            self._run("registrations", partial(register, settings.gateways, where, access))

    def _add_services(self) -> LiveAdapters:
        settings = self._settings
        hello = make_hello(self.engine, self._role, self._identity, self._digest, self._kv)
        adapters = LiveAdapters(self.engine, self.sessions, hello)
        self.service = WorkerService(self.dispatcher, self.sessions, self._drain, adapters, hello)
        worker_pb2_grpc.add_WorkerServicer_to_server(self.service, self._bound.server)
        if settings.has_reflection(settings.tls is None and is_loopback(settings.listen)):
            grpc_server.enable_reflection(self._bound.server, [SERVICE_NAME])
        return adapters

    def _run(self, name: str, work, **options) -> None:
        """Run a task until the worker ends."""
        self._exits.push_async_callback(_cancel, tasks.start(name, work, **options))

    def _on_ended(self, leg: Leg) -> None:
        self._spans.emit(leg)
        self._meters.ended(leg)

    def _readiness(self) -> tuple[bool, dict]:
        state = self._reports.state
        ready = state in ("serving", "compiling")
        return ready, {"ready": ready, "state": state}


class NextRole(NamedTuple):
    """The role that a drained worker takes next at the same address."""

    role: str
    address: str


@asynccontextmanager
async def running(settings: WorkerSettings, role: str, table: Table, stop: asyncio.Event) -> AsyncIterator[Worker]:
    """Run a worker within the block; the process ends if `stop` comes before its model is loaded. Raises ListenError,
    ModelError, SettingsError or ValueError, one line each."""
    bound = bind_server(settings)  # before loading weights, so that a taken port is reported immediately
    model_name = settings.engine.served_model_name or read_spec(settings.engine.model).name
    async with (
        open_admin(settings.admin, settings.admin_hosts, model_name, settings.tls) as admin,
        listening_for_ranks(settings) as rank_listener,
        sharing_cores(settings) as cores,
    ):
        memory = PoolMemory(settings.kv_mirror_gib)
        with progress.phase(f"{role}_worker", f"reading {settings.engine.model}"):
            digest = tokenizer_digest(settings.engine.model)
            loading = asyncio.to_thread(load_engine, settings.engine, memory, rank_listener, cores)
            engine = await _load_unless_stopped(loading, stop)
        _log_start(settings, engine)
        roofline = await asyncio.to_thread(of_engine, engine)
        async with Worker(settings, role, table, engine, memory, digest, bound, admin, roofline) as worker:
            yield worker


async def serve(settings: WorkerSettings, role: str, table: Table, stop: asyncio.Event) -> NextRole | int:
    """Serve until `stop` or a Drain call, then drain. Return the exit status, or the role to take next. Raises as
    `running` does."""
    telemetry.setup(f"baton-{role}")
    async with running(settings, role, table, stop) as worker:
        host = host_of(settings.listen)
        admin = f"{host_of(settings.admin)}:{worker.admin_port}"
        engine = worker.engine
        details = f"role={role} context={engine.config.max_model_len} model={engine.model_identity.hex()}"
        print(f"ready grpc={host}:{worker.port} admin={admin} pid={os.getpid()} {details}", flush=True)
        next_role = await worker.drain_when(stop)
        status = STAYS_AWAY if worker.stays_away else 0
    telemetry.shut_down()
    # `stop` is checked again: a signal may have come while the worker closed, and the next program would not know it.
    return NextRole(next_role, f"{host}:{worker.port}") if next_role and not stop.is_set() else status


def _log_start(settings: WorkerSettings, engine: Engine) -> None:
    """Log what was loaded, and warn of anything slower or smaller than it could be."""
    log.info("%s", start_line(engine))
    for line in start_details(engine):
        log.debug("%s", line)
    if (why := native.unavailable()) and engine.pool.device.type == "cpu":
        log.warning("%s", cpu.lost(why, engine.spec.dtype, engine.config.dtype))
    elif engine.pool.device.type == "cpu" and engine.config.dtype == "fp16":
        log.warning("the native kernels do not compute in fp16: torch does, several times slower; give --dtype bf16")
    if engine.pool.device.type == "cuda" and engine.config.batch_invariant:
        log.info(
            "no result depends on the batch it is computed in; --no-batch-invariant takes cuBLAS and flash-attn, too"
        )
    if why := _unused_gpu(engine):
        log.warning("computes on the CPU although an NVIDIA driver is loaded: %s", why)
    held, context = engine.config.max_model_len, engine.spec.context
    if settings.engine.max_model_len is None and held < context:
        why = f"its KV pool has {engine.num_blocks} blocks; give more --num-blocks"
        log.warning("holds %d of the model's %d tokens: %s", held, context, why)


def _devices_of(engine: Engine) -> list[torch.device]:
    """Return the devices of the engine's ranks, the first rank's first."""
    own = engine.pool.device
    return [own] if own.type == "cpu" or engine.ranks is None else devices_for(engine.config)


def _unused_gpu(engine: Engine) -> str:
    """Return why `--device auto` chose the CPU on a machine with an NVIDIA driver; "" if it did not."""
    if engine.pool.device.type != "cpu" or engine.config.device != "auto" or not DRIVER.exists():
        return ""
    return gpu_refusal() or unfit()


async def _cancel(task: asyncio.Task) -> None:
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
