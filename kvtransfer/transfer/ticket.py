"""Authorize the pull of a lease by tickets that only the source's process can mint and check."""

import hmac
import secrets
import struct

from google.protobuf.message import DecodeError

from baton.v1 import kv_pb2
from kvtransfer.errors import ProtocolError, TicketRefused

_DOMAIN = b"baton-ticket-1"


class TicketMint:
    """Mint and check tickets. `key`: 32 random bytes that live as long as the process, so that no ticket outlives the
    pool that it opens; the ranks of one source share them."""

    def __init__(self, key: bytes | None = None):
        self._key = key or secrets.token_bytes(32)

    def mint(self, lease_id: bytes, taker_instance: bytes, taker_epoch: int, fetch_id: bytes | None = None) -> bytes:
        """Return a ticket with a new fetch id, or with `fetch_id`. The same taker may use it again to continue after a
        broken connection."""
        ticket = kv_pb2.Ticket(
            lease_id=lease_id, taker_instance=taker_instance, taker_epoch=taker_epoch,
            fetch_id=fetch_id or secrets.token_bytes(16),
        )  # fmt: skip
        ticket.mac = self._mac(ticket)
        return ticket.SerializeToString()

    def check(self, ticket: kv_pb2.Ticket, taker_instance: bytes, taker_epoch: int) -> None:
        """Raise TicketRefused unless this process minted `ticket` for exactly this taker."""
        if not hmac.compare_digest(ticket.mac, self._mac(ticket)):
            raise TicketRefused("the ticket was not minted by this process: ask for another Offer")
        if (ticket.taker_instance, ticket.taker_epoch) != (taker_instance, taker_epoch):
            raise TicketRefused("the ticket is another taker's: every taker needs its own Offer")

    def _mac(self, ticket: kv_pb2.Ticket) -> bytes:
        fields = (ticket.lease_id, ticket.taker_instance, struct.pack("<Q", ticket.taker_epoch), ticket.fetch_id)
        message = _DOMAIN + b"".join(struct.pack("<I", len(part)) + part for part in fields)
        return hmac.digest(self._key, message, "sha256")


def parse_ticket(data: bytes) -> kv_pb2.Ticket:
    """Return the ticket. Raises ProtocolError for bytes that are no ticket."""
    try:
        return kv_pb2.Ticket.FromString(data)
    except DecodeError as error:
        raise ProtocolError("these bytes are no ticket") from error
