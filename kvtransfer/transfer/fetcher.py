"""Run the side that wants KV: choose a transport, pull what is missing, and reconnect when the connection breaks."""

import asyncio
import logging
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Self

from baton.v1 import kv_pb2
from kvtransfer.compatible import EXACT, MIXED, relation
from kvtransfer.errors import (
    DigestMismatch,
    KVError,
    LayoutMismatch,
    PeerLost,
    TicketRefused,
    TransferTimedOut,
    TransportBroken,
)
from kvtransfer.layout import KVHandle, Taker
from kvtransfer.memory.blocks import check_movable
from kvtransfer.memory.convert import Codec
from kvtransfer.memory.digest import KINDS
from kvtransfer.memory.reshard import Share, plan
from kvtransfer.transfer.destination import Destination, SharedDestination
from kvtransfer.transfer.dialogue import together
from kvtransfer.transfer.local_pool import LocalPool
from kvtransfer.transfer.pull import Pull
from kvtransfer.transfer.ticket import parse_ticket
from kvtransfer.transports import inproc
from kvtransfer.transports.endpoints import Dialer
from kvtransfer.transports.grpc_stream import OPEN, Security
from kvtransfer.transports.transport import KVConnection, TransferRates, TransportChoice, allowed, choose
from kvtransfer.wire import decode_handle

_PAUSES_S = (0.05, 0.2, 0.5)  # before each new connection to a source that was lost
_MAX_KEPT = 256  # (source, transport) pairs that are remembered
_MAX_MISMATCHES = 2  # wrong digests in a row from one source over one transport, before another transport is used

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class FetchReport:
    """Report what a fetch moved and how long that took."""

    num_tokens: int
    num_bytes: int
    num_bytes_early: int  # the part of num_bytes that left the source before its prefill ended
    transport: str  # joined by + where ranks of the source were reached by several
    numerics: str  # exact | mixed
    transfer_s: float  # from the first Want to the last Confirm
    after_last_ready_s: float  # the part of transfer_s that did not overlap with the prefill
    reason: str  # why this transport was chosen, one line

    @classmethod
    def merged(cls, reports: Sequence[Self]) -> Self:
        """Return the report of a fetch whose parts several ranks have pulled."""
        return cls(
            num_tokens=reports[0].num_tokens,
            num_bytes=sum(report.num_bytes for report in reports),
            num_bytes_early=sum(report.num_bytes_early for report in reports),
            transport="+".join(dict.fromkeys(report.transport for report in reports)),
            numerics=MIXED if any(report.numerics == MIXED for report in reports) else EXACT,
            transfer_s=max(report.transfer_s for report in reports),
            after_last_ready_s=max(report.after_last_ready_s for report in reports),
            reason="; ".join(dict.fromkeys(report.reason for report in reports)),
        )


class Fetcher:
    """Pull prompts into `pool`.

    `counters`: failed fetches by cause (digest_mismatch, lease_expired, ...), fetches_done, fetches_mixed."""

    def __init__(
        self, pool: LocalPool, instance: bytes, epoch: int, host_id: str, transports: Sequence[str] | str, *,
        numerics_class: str, socket_folder: Path | None = None, codec: Codec | None = None, digest: str = "sum",
        is_strict: bool = False, security: Security = OPEN,
    ):  # fmt: skip
        """Connect to nothing yet. `transports`: names that this taker may use, or `auto`. `codec` converts between
        forms; without it only equal forms are accepted. Raises ValueError for an unknown transport or digest."""
        if digest not in KINDS:
            raise ValueError(f"digest {digest!r}: one of {', '.join(KINDS)}")
        self.counters: Counter[str] = Counter()
        self._pool = pool
        self._instance = instance
        self._epoch = epoch
        self._host_id = host_id
        self._numerics_class = numerics_class
        self._codec = codec
        self._digest = digest
        self._is_strict = is_strict
        self._transports = allowed(transports)
        self._dialer = Dialer(pool.host, pool.device and pool.device.device.region, socket_folder, security)
        self._broken: dict[tuple[bytes, str], None] = {}  # (source, transport) pairs that do not work
        self._digest_mismatches: Counter[tuple[bytes, str]] = Counter()  # since the last fetch without one
        self._rates = TransferRates()

    def taker(self) -> Taker:
        """Return what a source needs to make an offer."""
        return Taker(self._instance, self._epoch, self._pool.layout, self._numerics_class)

    async def fetch(self, handle: bytes, ticket: bytes, destination: Destination, deadline: float) -> FetchReport:
        """Pull all tokens that `destination` misses, until `deadline` on time.monotonic().

        Raises a KVError, or what `destination` raises. Once this has returned, raised or been cancelled, no byte lands
        and `verified` is not called."""
        timeout = asyncio.timeout(max(0.0, deadline - time.monotonic()) if deadline != float("inf") else None)
        try:
            async with timeout:
                report = await self._fetch(decode_handle(handle), self._want(ticket), destination)
        except TimeoutError as error:
            if not timeout.expired():
                raise
            self.counters[TransferTimedOut.status] += 1
            raise TransferTimedOut("the KV was not there in time") from error
        except KVError as error:
            self.counters[error.status] += 1
            raise
        self.counters["fetches_done"] += 1
        self.counters["fetches_mixed"] += report.numerics == MIXED
        return report

    def close(self) -> None:
        """Unmap the pools of other processes. No fetch may be under way."""
        self._dialer.close()

    async def _fetch(self, handle: KVHandle, want: kv_pb2.Want, destination: Destination) -> FetchReport:
        numerics, shares = self._check(handle, want)
        shared, began = SharedDestination(self._pool.host, destination, len(shares), handle), time.monotonic()
        pulls = [
            Pull(self._pool, handle, share, index, shared, self._digest, self._codec)
            for index, share in enumerate(shares)
        ]  # fmt: skip
        choices = [
            choose(share.part.endpoints, self._host_id, self._transports, inproc.is_here, self._pool.memory,
                   pull.are_alike, self._broken_with(pull.source))
            for share, pull in zip(shares, pulls)
        ]  # fmt: skip
        used: list[tuple[str, str]] = []
        await together([self._pull(pull, choice, want, used) for pull, choice in zip(pulls, choices)])
        await shared.caught_up()
        last_confirm = max(pull.last_confirm for pull in pulls)
        return FetchReport(
            num_tokens=handle.prompt.num_tokens - shared.num_cached_tokens,
            num_bytes=sum(pull.num_bytes for pull in pulls),
            num_bytes_early=sum(pull.num_bytes_early for pull in pulls),
            transport="+".join(dict.fromkeys(transport for transport, _ in used)),
            numerics=numerics,
            transfer_s=last_confirm - began,
            after_last_ready_s=max(0.0, last_confirm - max(pull.last_ready for pull in pulls)),
            reason="; ".join(dict.fromkeys(reason for _, reason in used)),
        )

    async def _pull(self, pull: Pull, choice: TransportChoice, want: kv_pb2.Want, used: list[tuple[str, str]]) -> None:
        """Pull one share, over as many connections as that takes."""
        pauses = iter(_PAUSES_S)
        while True:
            before = pull.verified_token
            try:
                used.append(await self._pull_once(pull, choice, want))
                return
            except TransportBroken as error:
                choice = self._without(choice, pull.source, error)
            except PeerLost:
                if pull.verified_token > before:
                    pauses = iter(_PAUSES_S)
                pause = next(pauses, None)
                if pause is not None:
                    await asyncio.sleep(pause)
                elif not pull.is_done:
                    raise
                else:
                    break
        # Everything is verified; the source is gone and only the End was lost.
        used.append((choice.endpoints[0].transport, choice.reason))

    def _broken_with(self, source: bytes) -> set[str]:
        return {transport for name, transport in self._broken if name == source}

    def _without(self, choice: TransportChoice, source: bytes, error: TransportBroken) -> TransportChoice:
        """Return `choice` without the transport that failed with this source; later fetches leave it out too. Raises
        `error` when no transport is left."""
        transport = error.transport
        self._set_aside(source, transport)
        left = tuple(endpoint for endpoint in choice.endpoints if endpoint.transport != transport)
        if not left:
            raise error
        log.warning("%s is not used with this source any more: %s", transport, error)
        return TransportChoice(left, f"{left[0].transport}, because {transport}: {error}")

    def _note_mismatch(self, choice: TransportChoice, source: bytes, transport: str, error: DigestMismatch) -> None:
        """Count a digest mismatch. After _MAX_MISMATCHES in a row, later fetches use another transport, if there is
        one."""
        self._digest_mismatches[source, transport] += 1
        if len(self._digest_mismatches) > _MAX_KEPT:
            del self._digest_mismatches[next(iter(self._digest_mismatches))]
        if self._digest_mismatches[source, transport] < _MAX_MISMATCHES or len(choice.endpoints) < 2:
            return
        del self._digest_mismatches[source, transport]
        self._set_aside(source, transport)
        log.warning("%s is not used with this source any more: %d times in a row %s", transport, _MAX_MISMATCHES, error)

    def _set_aside(self, source: bytes, transport: str) -> None:
        self._broken[source, transport] = None
        if len(self._broken) > _MAX_KEPT:
            del self._broken[next(iter(self._broken))]

    async def _pull_once(self, pull: Pull, choice: TransportChoice, want: kv_pb2.Want) -> tuple[str, str]:
        """Pull over one connection from Want to End; return the transport and why it was chosen. Raises PeerLost when
        the connection breaks."""
        connection, transport, reason = await self._connect(pull, choice)
        try:
            await pull.run(connection, transport, want)
        except DigestMismatch as error:
            self._note_mismatch(choice, pull.source, transport, error)
            raise
        finally:
            connection.close()
        self._digest_mismatches.pop((pull.source, transport), None)
        self._rates.note(pull.source, transport, pull.num_bytes, pull.moving.seconds)
        rate = self._rates.gigabytes_per_s(pull.source, transport)
        return transport, f"{reason}; {rate:.1f} GB/s so far" if rate else reason

    async def _connect(self, pull: Pull, choice: TransportChoice) -> tuple[KVConnection, str, str]:
        """Return a connection to the best endpoint that can be reached now, its transport, and why it was chosen.
        Raises PeerLost if none can be reached."""
        failures = []
        for endpoint in choice.endpoints:
            try:
                connection = await self._dialer.open(endpoint, pull.source_layout)
            except PeerLost as error:
                failures.append(f"{endpoint.transport}: {error}")
                continue
            reason = f"{endpoint.transport}, because {'; '.join(failures)}" if failures else choice.reason
            return connection, endpoint.transport, reason
        raise PeerLost("; ".join(failures))

    def _want(self, ticket: bytes) -> kv_pb2.Want:
        """Return the fields of a Want that are the same on all connections. Raises TicketRefused for another taker's
        ticket, ProtocolError for bytes that are no ticket."""
        parsed = parse_ticket(ticket)
        if (parsed.taker_instance, parsed.taker_epoch) != (self._instance, self._epoch):
            raise TicketRefused("the ticket is another taker's: every taker needs its own Offer")
        return kv_pb2.Want(ticket=parsed, taker_instance=self._instance, taker_epoch=self._epoch)

    def _check(self, handle: KVHandle, want: kv_pb2.Want) -> tuple[str, tuple[Share, ...]]:
        """Return exact or mixed, and the shares to pull, before anything is allocated. Raises LayoutMismatch,
        TicketRefused."""
        if want.ticket.lease_id != handle.lease_id:
            raise TicketRefused("the ticket is for another lease than the handle")
        check_movable(handle.layout)
        numerics = relation(
            handle.layout, handle.numerics_class, self._pool.layout, self._numerics_class, is_strict=self._is_strict
        )
        theirs, ours = ([group.form for group in layout.groups] for layout in (handle.layout, self._pool.layout))
        if self._codec is None and theirs != ours:
            raise LayoutMismatch(f"the source keeps {handle.layout}, the taker {self._pool.layout} and has no codec")
        return numerics, plan(handle.parts, self._pool.sharding.shards, self._pool.sharding.rank)
