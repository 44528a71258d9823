"""Run a rank on another host than its worker: join the worker, read the assigned layers, and compute."""

import asyncio
import json
import logging
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TypeVar

import grpc
import torch

import baton
from baton.engine.core.config import EngineConfig
from baton.engine.core.device import instruction_set, set_threads
from baton.engine.core.model_errors import ModelError
from baton.engine.core.reproducible import fix_order_of_sums
from baton.engine.kv.pool import CPU, DTYPES, KVPool
from baton.engine.models.decoder import Model
from baton.engine.models.leading import follow_stage
from baton.engine.models.loader import load_model, model_identity
from baton.engine.parallel.collectives import RankLost
from baton.engine.parallel.pipeline import PipelineFollower
from baton.engine.ranks.build_digest import build_digest
from baton.engine.ranks.process import Assignment, Ready
from baton.engine.ranks.spawn import BEAT_S
from baton.service.fatal import exit_at_once
from baton.service.net.client import explain_failure, open_channel
from baton.service.net.server import until_stopped
from baton.service.security.access import Access
from baton.service.security.exposure import is_loopback
from baton.service.security.guard import Guard
from baton.service.security.tls import WORKER_NAME, Tls
from baton.worker.kv.convert import convert_rows
from baton.worker.kv.native_digests import memory_kernels
from baton.worker.ranks.source import RankSource
from baton.worker.ranks.stream import BROKEN, PATH, JoinedStream
from kvtransfer.layout import Box, KVLayout
from kvtransfer.memory.region import Region
from kvtransfer.memory.reshard import Sharding
from kvtransfer.transfer.local_pool import LocalPool
from kvtransfer.transfer.source import Source
from kvtransfer.transports.endpoints import Address
from kvtransfer.transports.grpc_stream import OPEN, Security
from kvtransfer.transports.transport import local_host_id

CONNECT_S = 60.0  # to the worker, which may be started after its ranks
HEARD_S = 10.0  # for the worker to read why its rank ends

T = TypeVar("T")

log = logging.getLogger(__name__)


class NotJoined(Exception):
    """Says in one line why this rank does not serve a worker, or no longer does."""


@dataclass(frozen=True)
class RankSettings:
    """Settings of a rank: where its worker is, and what is on this host."""

    leader: str
    model: Path
    threads: int | None = None
    access: Access = Access()
    kv_host: str = "127.0.0.1"  # where takers of KV reach this rank
    kv_first_port: int = 0  # first port for takers; 0: the system chooses


async def serve_rank(settings: RankSettings, stop: asyncio.Event) -> None:
    """Join the worker and serve it until `stop`; the process ends if that comes while it reads its model. Raises
    ModelError, and NotJoined if the worker refuses the rank or ends."""
    try:
        async with open_channel(settings.leader, settings.access, WORKER_NAME) as channel:
            await until_stopped(_join(settings, channel), stop)
    except grpc.aio.AioRpcError as error:
        explained = await asyncio.to_thread(
            explain_failure, settings.leader, error.code(), error.details(), settings.access
        )
        raise NotJoined(explained) from None
    except OSError as error:
        raise NotJoined(str(error)) from None


async def _join(settings: RankSettings, channel: grpc.aio.Channel) -> None:
    identity = await _read(partial(model_identity, settings.model))
    try:
        await asyncio.wait_for(channel.channel_ready(), CONNECT_S)
    except TimeoutError:
        silence = f"no connection in {CONNECT_S:.0f} s"
        raise NotJoined(
            await asyncio.to_thread(
                explain_failure, settings.leader, grpc.StatusCode.UNAVAILABLE, silence, settings.access
            )
        ) from None
    call = channel.stream_stream(PATH)()
    try:
        await _serve(settings, identity.hex(), call)
    finally:
        call.cancel()


async def _serve(settings: RankSettings, identity: str, call: grpc.aio.StreamStreamCall) -> None:
    message = await _handshake(settings, call)
    try:
        given, config, model = await _read_part(settings, identity, message)
    except (ModelError, ValueError) as error:
        await _say_why(call, error)
        raise
    stream = JoinedStream()
    layout = KVLayout((model.kv_group(config.kv_dtype, config.block_size),))
    assert given.stage is not None and config.num_blocks is not None
    region = Region.create(config.num_blocks * layout.block_bytes)  # room for all layers; only used pages take memory
    source = _make_source(settings, layout, given.stage.layers, region, stream)
    stream.on_note = source.handle_note
    try:
        await call.write(Ready.of(model).line().encode())
    except BROKEN:
        raise _left(settings) from None
    carrying = asyncio.create_task(stream.run(call.read, call.write))
    log.info("serves layers %s of %s", given.stage.layers, settings.leader)
    try:
        kv = KVPool(layout, config.num_blocks, region.memory)
        await asyncio.to_thread(_follow, config, model, kv, stream)
    finally:
        stream.close()
        await asyncio.gather(carrying, return_exceptions=True)
        await source.stop()
    raise _left(settings)


async def _handshake(settings: RankSettings, call: grpc.aio.StreamStreamCall) -> str:
    """Say what this rank is; return the worker's answer, an Assignment. Raises NotJoined if the worker refuses."""
    own = {"version": baton.__version__, "build": build_digest(), "instructions": instruction_set(CPU)}
    await call.write(json.dumps(own).encode())
    message = await call.read()
    if not isinstance(message, bytes):
        await call.code()  # wait for the end; the status of a failed call was raised by `read`
        raise NotJoined(f"{settings.leader} has closed the connection")
    fields = json.loads(message)
    if "refused" in fields:
        raise NotJoined(f"the worker at {settings.leader} refuses this rank: {fields['refused']}")
    return message.decode()


async def _read_part(settings: RankSettings, identity: str, message: str) -> tuple[Assignment, EngineConfig, Model]:
    """Read this rank's part of the model. Raises ModelError, and ValueError for an Assignment that this build cannot
    read."""
    if json.loads(message).get("build") != build_digest():
        raise ValueError(f"the worker runs another build of baton {baton.__version__}: install one on both hosts")
    given = Assignment.parse(message)
    set_threads(settings.threads)
    config = replace(given.config, model=settings.model, threads=torch.get_num_threads())
    if given.identity != identity:
        raise ModelError(f"{settings.model}: is model {identity[:16]}, the worker has {given.identity[:16]}")
    return given, config, await _read(partial(_load, config, given))


async def _say_why(call: grpc.aio.StreamStreamCall, error: Exception) -> None:
    """Tell the worker why this rank ends, and wait until it has read that. If the rank hung up without waiting, workers
    were seen to read the end of the call instead."""
    with suppress(*BROKEN, TimeoutError):
        await call.write(json.dumps({"error": str(error)}).encode())
        await call.done_writing()
        await asyncio.wait_for(call.code(), HEARD_S)


def _make_source(
    settings: RankSettings, layout: KVLayout, layers: range, region: Region, stream: JoinedStream
) -> RankSource:
    """Return the source of these layers' KV, which serves takers once the worker opens it."""
    security = _security(settings.access)
    address = Address(settings.kv_host, security=security, first_port=settings.kv_first_port)
    transports = ("tcp", "grpc") if security is OPEN or is_loopback(f"{settings.kv_host}:0") else ("grpc",)
    box = Box(0, layers, range(layout.groups[0].num_kv_heads))
    pool = LocalPool.of(region.memory, Sharding(layout, ((box,),), in_whole_pool=True), kernels=memory_kernels())
    make = partial(Source, pool, host_id=local_host_id(None), transports=transports, codec=convert_rows)
    return RankSource(make, address, stream.send_note)


def _left(settings: RankSettings) -> NotJoined:
    return NotJoined(f"the worker at {settings.leader} has ended, or its connection: this rank ends too")


def _security(access: Access) -> Security:
    """Return credentials by which only workers can take KV over gRPC; plain text without certificates."""
    if not (access.tls_cert and access.tls_key and access.tls_ca):
        return OPEN
    tls = Tls(access.tls_cert, access.tls_key, access.tls_ca)
    return Security(tls.server(True), (Guard(),), tls.channel, WORKER_NAME)


async def _read(reading: Callable[[], T]) -> T:
    """Return the result of `reading`, run in a thread. The thread ends only with the process, so cancellation ends the
    process."""
    try:
        return await asyncio.to_thread(reading)
    except asyncio.CancelledError:
        exit_at_once("told to end before its model was loaded", logging.INFO, 0)
        raise


def _load(config: EngineConfig, given: Assignment) -> Model:
    assert config.threads is not None
    torch.set_num_threads(config.threads)
    if config.batch_invariant:
        fix_order_of_sums()
    return load_model(config, stage=given.stage)


def _follow(config: EngineConfig, model: Model, pool: KVPool, stream: JoinedStream) -> None:
    """Compute steps until the worker is gone."""
    assert config.threads is not None
    torch.set_num_threads(config.threads)
    rows = torch.zeros(config.num_rows, model.spec.hidden_size, dtype=DTYPES[config.dtype])
    follower = PipelineFollower(stream, rows)
    threading.Thread(target=_beat, args=(follower,), daemon=True).start()
    with suppress(RankLost), torch.inference_mode():
        follow_stage(model, follower, pool)


def _beat(follower: PipelineFollower) -> None:
    with suppress(RankLost):
        while True:
            follower.beat()
            time.sleep(BEAT_S / 2)
