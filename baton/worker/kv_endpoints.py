"""Run both ends of a worker's KV transfer, over one pool or the pools of its ranks: a source that gives and a fetcher
that takes."""

import logging
from dataclasses import replace
from functools import partial

from baton.engine.engine import Engine
from baton.service.security.guard import Guard
from baton.worker.kv.convert import convert_rows
from baton.worker.kv.handoff import Handoff, Leaseholders
from baton.worker.kv.intake import Intake, KVFetcher
from baton.worker.kv.pool_memory import PoolMemory
from baton.worker.kv.security import kv_security
from baton.worker.ranks.fetches import RankedFetcher, RankFetches
from baton.worker.ranks.leases import RankedSource
from baton.worker.ranks.notes import DeviceSettings
from baton.worker.ranks.rank_pools import RankPools
from baton.worker.ranks.relay import RelayingFetcher
from baton.worker.settings import WorkerSettings
from kvtransfer.capabilities import CAPABILITIES
from kvtransfer.compatible import gives, takes
from kvtransfer.memory.reshard import Sharding
from kvtransfer.transfer.fetcher import Fetcher
from kvtransfer.transfer.local_pool import LocalPool
from kvtransfer.transfer.source import Source, SourceIdentity
from kvtransfer.transfer.ticket import TicketMint
from kvtransfer.transports.endpoints import Address
from kvtransfer.transports.transport import allowed, local_host_id

log = logging.getLogger(__name__)
REGISTERING = "nixl"  # the transport that registers the pages of a pool once, for the network card


def usable_transports(engine: Engine, settings: WorkerSettings) -> list[str]:
    """Return the transports of the settings, in order, that this engine's pool can use. Raises ValueError if the
    settings name one that cannot follow a pool whose pages come and go, or if, on a CPU, no transport moves the model's
    states."""
    found = [name for name in allowed(settings.transports) if name not in settings.refused_transports]
    if engine.layout.state is not None and engine.pool.device.type == "cpu" and found == [REGISTERING]:
        raise ValueError(
            f"--transports {REGISTERING}: layers of {engine.model_name} keep a state, which does not cross by it; "
            "leave it at auto, or name shm, tcp or grpc too"
        )
    if engine.ledger.parts is None:
        return found
    if REGISTERING in settings.transports:
        raise ValueError(
            f"--transports {REGISTERING}: layers of {engine.model_name} have windows, and their KV outside of these goes back to "
            "the system, which registered memory cannot; leave it at auto, or give shm, tcp or grpc"
        )
    return [name for name in found if name != REGISTERING]


class KVEndpoints:
    """Own both ends. `handoff` leases this worker's KV, `intake` pulls KV of other workers; legs may use both before
    `start`, takers connect after it. `gives` and `takes`: labels of KV that may leave and come; `layout`: of the whole
    model's KV."""

    def __init__(
        self, engine: Engine, memory: PoolMemory, identity: SourceIdentity, settings: WorkerSettings, guard: Guard
    ):
        """Set up both ends; `guard` protects KV over gRPC. Raises LayoutMismatch for a layout that cannot be moved,
        ValueError for a transport that this pool cannot use."""
        self._settings, self._mirror_gib = settings, memory.mirror_gib
        self._transports = usable_transports(engine, settings)
        self._security = kv_security(settings.tls, guard)
        self.host_id = local_host_id(settings.kv_socket_dir)
        self._rank_pools = RankPools.of(engine)
        self.layout = self._rank_pools.sharding.layout
        self.gives, self.takes = [], []  # without labels no KV is exchanged: states on a GPU cannot be moved
        if engine.pool.device.type == "cpu" or engine.layout.state is None:
            self.gives = gives(self.layout, identity.numerics_class, is_strict=settings.strict_numerics)
            self.takes = takes(self.layout, identity.numerics_class, is_strict=settings.strict_numerics)
        else:
            log.warning("states on a GPU do not cross: this worker's KV neither leaves nor comes, it serves alone")
        self.holders = Leaseholders()
        self._ranked_source = (
            RankedSource(self._rank_pools.ranks, self.holders.lease_ended) if self._rank_pools.ranks else None
        )
        pool = memory.as_local_pool(self._rank_pools.sharding)
        self.source = self._make_source(engine, pool, identity)
        self.handoff = Handoff(self._ranked_source or self.source, self.holders)
        self._fetcher = self._make_fetcher(pool, identity)
        self._fetches = [RankFetches(stream) for stream in self._rank_pools.local]
        self.intake = Intake(engine, self._fetcher_into(engine))
        self._address = Address(
            settings.listen_host, settings.advertise_host, settings.host_folder, self._security, settings.kv_port
        )

    async def start(self) -> None:
        """Listen for takers. Raises OSError, which names what cannot be listened on."""
        await self.source.start(self._address)
        if self._ranked_source is None:
            return
        for index, rank in enumerate(self._rank_pools.joined):
            rank.stream.on_note = partial(self._ranked_source.handle_note, index)
        for index, (stream, fetches) in enumerate(zip(self._rank_pools.local, self._fetches, strict=True)):
            stream.on_note, stream.on_end = partial(self._handle_note, index), fetches.lose
            await stream.start()
        settings = self._settings
        await self._ranked_source.start(
            self.source.identity, settings.lease_ttl_s, settings.strict_numerics, self._device_settings()
        )

    async def stop(self) -> None:
        """End all leases and dialogues."""
        try:
            await self.source.stop()
        finally:
            self._fetcher.close()
            for stream in self._rank_pools.local:
                await stream.stop()

    def _make_source(self, engine: Engine, pool: LocalPool, identity: SourceIdentity) -> Source:
        settings, ranked, states = self._settings, self._ranked_source, engine.ledger.states
        source = Source(
            pool, identity, self.host_id, self.holders.lease_ended if ranked is None else ranked.own_lease_ended,
            mint=None if ranked is None else TicketMint(ranked.mint_key), generations=engine.ledger.generation,
            state_generations=states and states.generation, lease_ttl_s=settings.lease_ttl_s,
            transports=self._own_transports(), codec=convert_rows, is_strict=settings.strict_numerics,
        )  # fmt: skip
        if ranked is not None:
            ranked.own = source
        return source

    def _make_fetcher(self, pool: LocalPool, identity: SourceIdentity) -> Fetcher:
        if self._rank_pools.joined:  # all KV is pulled here, and sent on to the other hosts
            pool = replace(pool, sharding=Sharding.whole(self.layout))
        settings = self._settings
        return Fetcher(
            pool, identity.instance, identity.epoch, self.host_id, self._own_transports(),
            numerics_class=identity.numerics_class, socket_folder=settings.kv_socket_dir, codec=convert_rows,
            digest=settings.kv_digest, is_strict=settings.strict_numerics, security=self._security,
        )  # fmt: skip

    def _own_transports(self) -> list[str]:
        """Return the transports of this process. Together with ranks on other hosts only those whose source sends can
        be used."""
        return [name for name in self._transports if CAPABILITIES[name].source_sends or not self._rank_pools.joined]

    def _fetcher_into(self, engine: Engine) -> KVFetcher:
        """Return the fetcher that brings KV to all ranks."""
        if self._rank_pools.joined:
            return RelayingFetcher(self._fetcher, engine.pool, self._rank_pools.joined)
        return RankedFetcher(self._fetcher, self._fetches) if self._fetches else self._fetcher

    def _handle_note(self, index: int, note: dict) -> None:
        if "fetch" in note:
            self._fetches[index].handle_note(note)
        elif self._ranked_source is not None:
            self._ranked_source.handle_note(index, note)

    def _device_settings(self) -> DeviceSettings:
        """Return the settings that ranks on GPUs of this host need."""
        settings, tls = self._settings, self._settings.tls
        return {
            "transports": self._transports, "listen_host": settings.listen_host, "digest": settings.kv_digest,
            "advertise_host": settings.advertise_host, "kv_port": settings.kv_port, "mirror_gib": self._mirror_gib,
            "socket_dir": settings.kv_socket_dir and str(settings.kv_socket_dir),
            "tls": tls and [str(tls.cert), str(tls.key), str(tls.ca)],
        }  # fmt: skip
