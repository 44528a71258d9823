"""The side that wants KV: chooses a transport, pulls what is missing, and comes back when the line breaks."""

import asyncio
import time
from collections.abc import Sequence
from dataclasses import dataclass

from baton.v1 import kv_pb2
from kvtransfer import inproc, shm, tcp
from kvtransfer.blocks import BlockMemory
from kvtransfer.errors import DeadlineExceeded, LayoutMismatch, PeerLost, ProtocolError, TicketRefused
from kvtransfer.layout import Endpoint, KVHandle, KVLayout
from kvtransfer.pull import Destination, Pull
from kvtransfer.shm import Mappings
from kvtransfer.ticket import parse_ticket
from kvtransfer.transport import Choice, Line, allowed, choose
from kvtransfer.wire import Taker, decode_handle

_PAUSES_S = (0.05, 0.2, 0.5)  # before each new line to a source that was lost


@dataclass(frozen=True, slots=True)
class FetchReport:
    num_tokens: int
    num_bytes: int
    transport: str
    transfer_s: float  # from the first Want to the last Confirm
    after_last_ready_s: float  # what of it the prefill could not hide
    reason: str  # why this transport, one line


class Fetcher:
    """`memory`: the pool that is written into. `transports`: those that this taker may use, or `auto`."""

    def __init__(
        self, memory, layout: KVLayout, instance: bytes, epoch: int, host_id: str,
        transports: Sequence[str] | str = ("shm", "tcp"), *, numerics_class: str,
    ):  # fmt: skip
        """Raises LayoutMismatch for a layout that cannot be moved, ValueError for an unknown transport."""
        self._memory = BlockMemory(memory, layout)
        self._layout = layout
        self._instance = instance
        self._epoch = epoch
        self._host_id = host_id
        self._numerics_class = numerics_class
        self._transports = allowed(transports)
        self._mappings = Mappings(layout)

    def taker(self, num_cached_tokens: int = 0) -> Taker:
        """What a source needs to know to make an offer."""
        return Taker(
            self._instance, self._epoch, self._layout, self._numerics_class, num_cached_tokens, self._transports,
            self._host_id,
        )  # fmt: skip

    async def fetch(self, handle: bytes, ticket: bytes, destination: Destination, deadline: float) -> FetchReport:
        """Pulls everything that `destination` misses; `deadline` on time.monotonic().

        Raises a KVError, or what `destination` raises. However it ends, cancellation included, no byte lands and
        `verified` is not called afterwards."""
        timeout = asyncio.timeout(max(0.0, deadline - time.monotonic()) if deadline != float("inf") else None)
        try:
            async with timeout:
                return await self._fetch(decode_handle(handle), self._want(ticket), destination)
        except TimeoutError as exc:
            if not timeout.expired():
                raise
            raise DeadlineExceeded("the KV was not there in time") from exc

    def close(self) -> None:
        """Unmaps the pools of other processes. No fetch may be under way."""
        self._mappings.clear()

    async def _fetch(self, handle: KVHandle, want: kv_pb2.Want, destination: Destination) -> FetchReport:
        choice = self._check(handle, want)
        pull, begin, began = Pull(self._memory, handle, destination), destination.num_cached_tokens, time.monotonic()
        pauses = iter(_PAUSES_S)
        while True:
            before = pull.verified_token
            try:
                transport, reason = await self._pull_once(pull, choice, want)
                break
            except PeerLost:
                if pull.verified_token > before:
                    pauses = iter(_PAUSES_S)
                pause = next(pauses, None)
                if pause is None:
                    raise
                await asyncio.sleep(pause)
        return FetchReport(
            handle.num_tokens - begin, pull.num_bytes, transport, pull.last_confirm - began,
            max(0.0, pull.last_confirm - pull.last_ready), reason,
        )  # fmt: skip

    async def _pull_once(self, pull: Pull, choice: Choice, want: kv_pb2.Want) -> tuple[str, str]:
        """One line from Want to End; the transport and why it was taken. Raises PeerLost when the line breaks."""
        line, transport, reason = await self._connect(choice)
        try:
            await pull.run(line, transport, want)
        finally:
            line.close()
        return transport, reason

    async def _connect(self, choice: Choice) -> tuple[Line, str, str]:
        """The best endpoint that can be reached now. Raises PeerLost when none can."""
        failures = []
        for endpoint in choice.endpoints:
            try:
                line = await self._open(endpoint)
            except PeerLost as exc:
                failures.append(f"{endpoint.transport}: {exc}")
                continue
            reason = f"{endpoint.transport}, because {'; '.join(failures)}" if failures else choice.reason
            return line, endpoint.transport, reason
        raise PeerLost("; ".join(failures))

    async def _open(self, endpoint: Endpoint) -> Line:
        match endpoint.transport:
            case "inproc":
                return await inproc.connect(endpoint.address)
            case "shm":
                return await shm.connect(endpoint.address, self._mappings, self._layout)
            case _:
                return await tcp.connect(endpoint.address)

    def _want(self, ticket: bytes) -> kv_pb2.Want:
        """Raises TicketRefused for another taker's ticket, ProtocolError for bytes that are none."""
        parsed = parse_ticket(ticket)
        if (parsed.taker_instance, parsed.taker_epoch) != (self._instance, self._epoch):
            raise TicketRefused("the ticket is another taker's: every taker needs its own Offer")
        return kv_pb2.Want(ticket=parsed, taker_instance=self._instance, taker_epoch=self._epoch)

    def _check(self, handle: KVHandle, want: kv_pb2.Want) -> Choice:
        """Before anything is allocated. Raises LayoutMismatch, ProtocolError, TransferFailed."""
        if handle.layout != self._layout:
            raise LayoutMismatch(f"the source keeps {handle.layout}, the taker {self._layout}")
        if handle.numerics_class != self._numerics_class:
            raise LayoutMismatch(f"the source computes {handle.numerics_class}, the taker {self._numerics_class}")
        if want.ticket.lease_id != handle.lease_id:
            raise TicketRefused("the ticket is for another lease than the handle")
        whole = [(i, range(g.num_layers), range(g.num_kv_heads)) for i, g in enumerate(self._layout.groups)]
        if [(part.group, part.layers, part.heads) for part in handle.parts] != whole:
            raise LayoutMismatch(f"the source holds {handle.parts} in parts, the taker needs {self._layout} whole")
        return choose(handle.parts[0].endpoints, self._host_id, self._transports, inproc.is_here)
