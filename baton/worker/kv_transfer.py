"""Both ends of the KV transfer of one worker, over one pool: a source that gives and a fetcher that takes."""

from baton.engine.engine import Engine
from baton.service.security.guard import Guard
from baton.service.security.tls import WORKER_NAME
from baton.worker.kv.convert import convert_rows
from baton.worker.kv.handoff import Handoff, Leaseholders
from baton.worker.kv.intake import Intake
from baton.worker.kv.native_digests import memory_kernels
from baton.worker.kv.pool_memory import PoolMemory
from baton.worker.ranks.leases import SpreadSource
from baton.worker.ranks.listener import JoiningRank
from baton.worker.settings import WorkerSettings
from kvtransfer.capabilities import CAPABILITIES
from kvtransfer.compatible import gives, takes
from kvtransfer.transfer.fetcher import Fetcher
from kvtransfer.transfer.source import Source, SourceIdentity
from kvtransfer.transfer.ticket import TicketMint
from kvtransfer.transports.endpoints import Address
from kvtransfer.transports.grpc_stream import Security
from kvtransfer.transports.socket_folder import default_parent
from kvtransfer.transports.transport import allowed, local_host_id


class KVTransfer:
    """`handoff` leases what is here, `intake` pulls what other workers have. `gives` and `takes`: words for the KV that
    others may take from here, and that may come here. Usable by keys at once; takers reach it from `start` on."""

    def __init__(
        self, engine: Engine, memory: PoolMemory, identity: SourceIdentity, settings: WorkerSettings, guard: Guard
    ):
        """`guard` protects KV over gRPC. Raises LayoutMismatch for a layout that cannot be moved."""
        host_id = local_host_id(settings.kv_socket_dir)
        self._lease_ttl_s, self._is_strict = settings.lease_ttl_s, settings.strict_numerics
        transports = [name for name in allowed(settings.transports) if name not in settings.refused_transports]
        security = _security(settings, guard)
        self.host_id = host_id
        numerics = (engine.layout, identity.numerics_class)
        ranks = [] if engine.ranks is None else [rank for rank in engine.ranks.joined if isinstance(rank, JoiningRank)]
        self.gives, self.takes = [], []  # of ranks on GPUs each has its heads in memory of its own: they do not meet
        if engine.ranks is None or engine.pool.device.type == "cpu":
            self.gives = gives(*numerics, is_strict=settings.strict_numerics)
            self.takes = takes(*numerics, is_strict=settings.strict_numerics)
        kernels, states = memory_kernels(), engine.ledger.states
        self.holders = Leaseholders()
        self._spread = SpreadSource(ranks, self.holders.lease_over) if ranks else None
        over, mint, sharding = self.holders.lease_over, None, None
        if self._spread is not None:
            over, mint = self._spread.own_over, TicketMint(self._spread.mint_key)
            sharding = self._spread.sharding(engine.layout)
            transports = [name for name in transports if CAPABILITIES[name].source_sends]
        self.source = Source(
            memory.region.memory, engine.layout, identity, host_id, over, sharding=sharding, mint=mint,
            generations=engine.ledger.generation, region=memory.region, device=memory.device, lease_ttl_s=settings.lease_ttl_s,
            transports=transports, codec=convert_rows, is_strict=settings.strict_numerics, kernels=kernels,
            room=memory.room, state_generations=states and states.generation,
        )  # fmt: skip
        if self._spread is not None:
            self._spread.own = self.source
        self.handoff = Handoff(self._spread or self.source, self.holders)
        self._fetcher = Fetcher(
            memory.region.memory, engine.layout, identity.instance, identity.epoch, host_id, transports,
            numerics_class=identity.numerics_class, socket_folder=settings.kv_socket_dir, codec=convert_rows,
            digest=settings.kv_digest, is_strict=settings.strict_numerics, device=memory.device, security=security,
            kernels=kernels, room=memory.room,
        )  # fmt: skip
        self.intake = Intake(engine, self._fetcher)
        folder = settings.kv_socket_dir or default_parent()
        self._address = Address(settings.listen_host, settings.advertise_host, folder, security)

    async def start(self) -> None:
        """Listen for takers. Raises OSError naming what cannot be listened on."""
        await self.source.start(self._address)
        if self._spread is not None:
            await self._spread.start(self.source.identity, self._lease_ttl_s, self._is_strict)

    async def stop(self) -> None:
        """End all leases and dialogues."""
        try:
            await self.source.stop()
        finally:
            self._fetcher.close()


def _security(settings: WorkerSettings, guard: Guard) -> Security:
    """Secure KV over gRPC: both sides show certificates, and the source lets workers in alone."""
    tls = settings.tls
    if tls is None:
        return Security(interceptors=(guard,))
    return Security(tls.server(True), (guard,), tls.channel, WORKER_NAME)
