"""A worker put together: engine and its loop, source and fetcher over the same pool, one gRPC server in front."""

import asyncio
import hashlib
import logging
import os
import secrets
from contextlib import AsyncExitStack
from functools import partial
from pathlib import Path
from typing import NamedTuple

from baton import tasks
from baton.engine import native
from baton.engine.core import cpu
from baton.engine.core.config import EngineConfig
from baton.engine.core.model_spec import ModelError
from baton.engine.engine import Engine
from baton.engine.kv.pool import KVPool
from baton.engine.loop import EngineLoop
from baton.gguf import GGUFError, GGUFHeader, is_gguf
from baton.service import progress
from baton.service.net import server as grpc_server
from baton.service.net.admin import Admin
from baton.service.net.server import Health
from baton.service.observe import telemetry
from baton.service.out_of_memory import leave_for_lost_device, leave_if_exhausted
from baton.service.security.access import Access
from baton.service.security.exposure import is_loopback
from baton.service.security.guard import Guard
from baton.service.security.tls import WORKER_NAME
from baton.v1 import worker_pb2 as pb
from baton.v1 import worker_pb2_grpc
from baton.worker.kv.convert import convert_rows
from baton.worker.kv.device_pool import device_pool
from baton.worker.kv.handoff import Handoff, Leaseholders
from baton.worker.kv.intake import Intake
from baton.worker.kv.native_digests import accelerate
from baton.worker.legs.leg import Leg
from baton.worker.observe.meters import WorkerMeters
from baton.worker.observe.reports import SERVICE_NAME, Reports
from baton.worker.observe.roofline import Roofline, full_step_s, of_engine
from baton.worker.observe.spans import Spans
from baton.worker.observe.tables import Tables
from baton.worker.registration import register
from baton.worker.session.commands import Commands
from baton.worker.session.drain import Drain
from baton.worker.session.lifecycle import Lifecycle, Table
from baton.worker.session.session import PROTOCOL, WorkerService
from baton.worker.settings import WorkerSettings
from baton.worker.wire.thread_bridge import Relay
from kvtransfer.compatible import gives, takes
from kvtransfer.errors import TransferFailed
from kvtransfer.memory.cuda_runtime import find_runtime
from kvtransfer.memory.device_memory import DeviceRegion
from kvtransfer.memory.pools import DevicePool
from kvtransfer.memory.region import Region
from kvtransfer.transfer.fetcher import Fetcher
from kvtransfer.transfer.source import Source, SourceIdentity
from kvtransfer.transports.endpoints import Address
from kvtransfer.transports.grpc_stream import Security
from kvtransfer.transports.socket_folder import default_parent
from kvtransfer.transports.transport import allowed, local_host_id
from kvtransfer.wire import layout_to_proto

INSTANCE_BYTES = 16
STOP_GRACE_S = 1.0

log = logging.getLogger(__name__)


class Pool:
    """The memory of a worker's KV, where other processes may map it. On a GPU `region` is the pool's mirror."""

    def __init__(self):
        self.region: Region | None = None
        self.gpu_region: DeviceRegion | None = None
        self.device: DevicePool | None = None

    def allocate(self, num_bytes: int) -> memoryview:
        self.region = Region.create(num_bytes)
        return self.region.memory

    def allocate_on_gpu(self, num_bytes: int, device) -> DeviceRegion:
        """Raises ValueError with the size where there is no room, or no libcudart to ask."""
        runtime = find_runtime()
        if runtime is None:
            raise ValueError("device cuda: libcudart was not found; leave --device at auto, or give cpu")
        try:
            self.gpu_region = DeviceRegion(runtime, device.index, num_bytes)
        except TransferFailed as error:
            size = f"{num_bytes / (1 << 30):.2f} GiB"
            raise ValueError(f"out of GPU memory: {size} of KV: {error}; give fewer --num-blocks") from None
        return self.gpu_region

    def mirror(self, pool: KVPool) -> None:
        """Host memory beside a pool on a GPU, for the transports that know no other; pages come as they are used."""
        if self.gpu_region is not None:
            self.device = device_pool(pool, self.gpu_region, self.allocate(pool.bytes.nbytes))

    def close(self) -> None:
        """Nothing computes any more."""
        self.region.close()
        if self.gpu_region is not None:
            self.gpu_region.close()


def load_engine(config: EngineConfig, pool: Pool) -> Engine:
    """Raises ModelError for a folder that cannot be served, ValueError for an option that does not fit the model."""
    engine = Engine.load(config, memory_for=pool.allocate, gpu_memory_for=pool.allocate_on_gpu)
    pool.mirror(engine.pool)
    return engine


class Worker:
    """`role`: prefill | decode, what it tells gateways it is for. `async with`: it serves until the block is left.

    `port` is the one that it listens on; `loop`, `engine` and `commands` are its parts."""

    def __init__(
        self, settings: WorkerSettings, role: str, table: Table, engine: Engine, pool: Pool, digest: bytes, server, port: int,
        guard: Guard, roofline: Roofline | None = None,
    ):  # fmt: skip
        """`digest`: of the tokenizer. `server` is bound to `port` and not started; `guard` stands before it. Without a
        `roofline` there is no baton_utilisation."""
        self.engine = engine
        self.port = port
        self._settings = settings
        self._role = role
        self._table = table
        self._pool = pool
        self._digest = digest
        self._server = server
        self._roofline = roofline
        self._guard = guard
        self._exits = AsyncExitStack()

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
        """Serves until `stop`, or until somebody asks over gRPC. Then: nothing new, what runs ends or moves, and every
        session is closed. Returns the role that comes next, or ""."""
        waiting = [asyncio.create_task(event.wait()) for event in (stop, self._drain.asked)]
        await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
        for task in waiting:
            task.cancel()
        await self._drain.run()
        return "" if stop.is_set() else self._drain.next_role

    async def _start(self) -> None:
        """Each part with its end; ends run in the opposite order."""
        engine, settings, exits = self.engine, self._settings, self._exits
        instance, epoch = secrets.token_bytes(INSTANCE_BYTES), secrets.randbits(64)
        memory, host_id = self._pool.region.memory, local_host_id(settings.kv_socket_dir)
        exits.callback(self._pool.close)
        transports = [name for name in allowed(settings.transports) if name not in settings.refused_transports]
        event_loop = asyncio.get_running_loop()
        relay = Relay(event_loop, lambda outputs: self.commands.on_outputs(outputs))
        self.loop = EngineLoop(engine, relay.put, leave_for_lost_device)

        holders = Leaseholders()
        source = Source(
            memory, engine.layout,
            SourceIdentity(instance, epoch, engine.model_identity, str(engine.numerics_class)), host_id,
            holders.lease_over, generations=engine.ledger.generation,
            region=self._pool.region, device=self._pool.device, lease_ttl_s=settings.lease_ttl_s, transports=transports,
            codec=convert_rows, is_strict=settings.strict_numerics,
        )  # fmt: skip
        handoff = Handoff(source, holders)
        fetcher = Fetcher(
            memory, engine.layout, instance, epoch, host_id, transports,
            numerics_class=str(engine.numerics_class), socket_folder=settings.kv_socket_dir, codec=convert_rows,
            digest=settings.kv_digest, is_strict=settings.strict_numerics, device=self._pool.device,
            security=self._kv_security(),
        )  # fmt: skip
        exits.callback(fetcher.close)
        spans = Spans(engine.spec.name)
        meters = WorkerMeters(engine, self._pool.region.memory.nbytes, self._roofline, self._guard.num_denied)

        def on_end(leg: Leg) -> None:
            spans.draw(leg)
            meters.ended(leg)

        intake = Intake(engine, fetcher)
        self.keys = Lifecycle(
            self._table, engine, handoff, intake, on_change=lambda: self.reports.change(), on_ended=on_end,
            resume_window_s=settings.resume_window_s,
        )  # fmt: skip
        self.commands = Commands(self.keys)
        exits.push_async_callback(source.stop)
        await source.start(self._kv_address())

        hello = self._hello(instance, epoch, host_id, source)
        self.service = service = WorkerService(engine, self.commands, hello)
        worker_pb2_grpc.add_WorkerServicer_to_server(service, self._server)
        health = Health(self._server)
        if settings.reflection or (settings.tls is None and is_loopback(settings.listen)):
            grpc_server.enable_reflection(self._server, [SERVICE_NAME])
        longest_step_s = full_step_s(engine, self._roofline) if self._roofline else 0.0
        tables = Tables(engine, self.commands, holders, intake, source, service)
        meters.watch(tables)
        self.reports = Reports(engine, self.loop, self.commands, service, health, tables, longest_step_s)
        self._drain = Drain(self.commands, service, settings.drain_grace_s)
        service.on_drain = self._drain.ask

        exits.callback(self.loop.stop)
        self.loop.start()
        reporting = tasks.start("reports", self.reports.run, on_failure=leave_if_exhausted)
        exits.push_async_callback(_cancel, reporting)
        exits.push_async_callback(self._server.stop, STOP_GRACE_S)
        exits.callback(health.shut_down)
        admin = Admin(self._readiness, {"/metrics": meters.page}, settings.admin_hosts)
        self.admin_port = await admin.start(settings.admin)
        exits.push_async_callback(admin.stop)
        await self._server.start()
        if settings.gateways:
            where = pb.RegisterRequest(address=self._address, role=self._role)
            access = Access(settings.tls_ca, settings.tls_cert, settings.tls_key)
            registering = tasks.start("registrations", partial(register, settings.gateways, where, access))
            exits.push_async_callback(_cancel, registering)

    @property
    def _address(self) -> str:
        """By which gateways reach this worker."""
        host = self._settings.advertise_host or self._settings.listen.rpartition(":")[0].strip("[]")
        return f"[{host}]:{self.port}" if ":" in host else f"{host}:{self.port}"

    def _readiness(self) -> tuple[bool, dict]:
        state = self.reports.state
        return state == "serving", {"ready": state == "serving", "state": state}

    def _kv_address(self) -> Address:
        settings = self._settings
        listen_host = grpc_server.split_address(settings.listen)[0]
        folder = settings.kv_socket_dir or default_parent()
        return Address(listen_host, settings.advertise_host, folder, self._kv_security())

    def _kv_security(self) -> Security:
        """Of KV over gRPC: both sides show certificates, and the source lets workers in alone."""
        tls = self._settings.tls
        if tls is None:
            return Security(interceptors=(self._guard,))
        return Security(tls.server(True), (self._guard,), tls.channel, WORKER_NAME)

    def _hello(self, instance: bytes, epoch: int, host_id: str, source: Source) -> pb.Hello:
        engine, config = self.engine, self.engine.config
        endpoints = source.endpoints()
        hello = pb.Hello(
            protocol_min=PROTOCOL,
            protocol_max=PROTOCOL,
            instance=instance,
            epoch=epoch,
            roles=[self._role],
            model_identity=engine.model_identity,
            tokenizer_digest=self._digest,
            layout=layout_to_proto(engine.layout),
            numerics_class=str(engine.numerics_class),
            host_id=host_id,
        )
        numerics = (engine.layout, str(engine.numerics_class))
        hello.kv_gives.extend(gives(*numerics, is_strict=self._settings.strict_numerics))
        hello.kv_takes.extend(takes(*numerics, is_strict=self._settings.strict_numerics))
        hello.kv_token_bytes = -(-engine.layout.block_bytes // config.block_size)
        hello.limits.max_model_len = config.max_model_len
        hello.limits.max_num_seqs = config.max_num_seqs
        hello.limits.max_num_batched_tokens = config.max_num_batched_tokens
        hello.limits.num_blocks = engine.num_blocks
        hello.limits.block_size = config.block_size
        hello.limits.model_context = engine.spec.context
        hello.model.name = engine.spec.name
        hello.model.family = engine.spec.family
        hello.model.context = config.max_model_len
        hello.model.vocab_size = engine.spec.vocab_size
        hello.model.dtype = config.dtype
        hello.model.quantization = "none" if engine.weight_form == config.dtype else engine.weight_form
        hello.model.kv_dtype = config.kv_dtype
        hello.model.attention = engine.attention_name
        hello.model.linear = engine.runner.model.head.name
        hello.model.speculator = config.speculator
        hello.model.proposers.extend(engine.speculator.proposers)
        hello.model.prefix_cache = True
        hello.model.transports.extend(endpoint.transport for endpoint in endpoints)
        for endpoint in endpoints:
            hello.endpoints.add(transport=endpoint.transport, address=endpoint.address, host_id=endpoint.host_id)
        return hello


def tokenizer_digest(folder: Path) -> bytes:
    """Of tokenizer.json, or of a .gguf file's: a gateway with another tokenizer would speak of other tokens."""
    if is_gguf(folder):
        try:
            return GGUFHeader(folder).tokenizer_digest
        except GGUFError as error:
            raise ModelError(str(error)) from None
    if not folder.is_dir():
        raise ModelError(f"{folder}: no such model folder")
    path = folder / "tokenizer.json"
    try:
        return hashlib.sha256(path.read_bytes()).digest()
    except OSError as error:
        raise ModelError(f"{path}: {error.strerror}") from None


class NextRole(NamedTuple):
    """What a worker that has drained becomes, at the same address."""

    role: str
    address: str


async def serve(settings: WorkerSettings, role: str, table: Table, stop: asyncio.Event) -> NextRole | None:
    """Serves until `stop`, or until it is asked to drain, then drains. Raises ListenError, ModelError, SettingsError
    or ValueError, one line each."""
    tls = settings.tls
    if tls:
        tls.check()
    guard = Guard(is_open=tls is None)
    server = grpc_server.make_server(interceptors=[guard])
    port = grpc_server.bind(
        server, settings.listen, tls and tls.server(require_certificate=True)
    )  # before the weights: a port that is taken shows at once
    pool = Pool()
    with progress.phase(f"{role}_worker", f"reading {settings.engine.model}"):
        digest = tokenizer_digest(settings.engine.model)
        engine = await asyncio.to_thread(load_engine, settings.engine, pool)
    accelerate()
    log.info("%s", engine.start_line)
    if (why := native.reason()) and engine.pool.device.type == "cpu":
        log.warning("%s", cpu.lost(why, engine.spec.dtype, engine.config.dtype))
    held, context = engine.config.max_model_len, engine.spec.context
    if settings.engine.max_model_len is None and held < context:
        why = f"its KV pool has {engine.num_blocks} blocks; give more --num-blocks"
        log.warning("holds %d of the model's %d tokens: %s", held, context, why)
    roofline = await asyncio.to_thread(of_engine, engine)
    telemetry.setup(f"baton-{role}")
    async with Worker(settings, role, table, engine, pool, digest, server, port, guard, roofline) as worker:
        host = settings.listen.rpartition(":")[0]
        admin = f"{settings.admin.rpartition(':')[0]}:{worker.admin_port}"
        said = f"role={role} context={held} model={engine.model_identity.hex()}"
        print(f"ready grpc={host}:{port} admin={admin} pid={os.getpid()} {said}", flush=True)
        next_role = await worker.drain_when(stop)
    telemetry.shut_down()
    return NextRole(next_role, f"{host}:{port}") if next_role else None


async def _cancel(task: asyncio.Task) -> None:
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
