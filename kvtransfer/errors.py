"""Everything that may go wrong with KV on its way, one class per cause; `status` is what an End frame carries."""


class KVError(Exception):
    """Base. Nothing of the failed range has been verified, so nothing of it may be attended to."""

    status = "internal"


class LayoutMismatch(KVError):
    """The two sides keep KV in different shapes or of different numerics; the message prints both."""

    status = "layout_mismatch"


class TicketRefused(KVError):
    """The ticket is forged, damaged, or another taker's."""

    status = "ticket_refused"


class LeaseExpired(KVError):
    """The source no longer keeps these blocks for the taker."""

    status = "lease_expired"


class TransferCancelled(KVError):
    """The other side gave the transfer up on purpose."""

    status = "cancelled"


class DigestMismatch(KVError):
    """The bytes that arrived are not the bytes that the source digested, or no digest came with them."""

    status = "digest_mismatch"


class StaleBlocks(KVError):
    """Blocks were reused, or their process restarted, while they were read or written."""

    status = "stale_blocks"


class ProtocolError(KVError):
    """A frame that is malformed, out of turn, or speaks of tokens, layers or blocks that are not there."""

    status = "protocol_error"


class TransferFailed(KVError):
    """The transfer cannot continue, for a reason that is neither side's bytes."""

    status = "internal"


class PeerLost(TransferFailed):
    """The line broke, or nothing was heard on it for too long. The same ticket may be used to continue."""

    status = "peer_lost"


class TransportBroken(PeerLost):
    """`transport` does not work between these two, although both offer it; another one may."""

    def __init__(self, transport: str, message: str):
        super().__init__(message)
        self.transport = transport


class DeviceHangs(TransferFailed):
    """A copy that was begun may still be writing, and nothing can stop it: its blocks must not be used again by this
    process, which therefore has to end."""


class TransferTimedOut(TransferFailed):
    """The caller's deadline has passed."""

    status = "deadline_exceeded"


_BY_STATUS = {
    cls.status: cls
    for cls in (
        LayoutMismatch, TicketRefused, LeaseExpired, TransferCancelled, DigestMismatch, StaleBlocks, ProtocolError,
        TransferFailed, PeerLost, TransferTimedOut,
    )
}  # fmt: skip


def from_status(status: str, message: str) -> KVError:
    """Return the error that the other side's End names."""
    return of_status(status, f"the other side ended with {status}: {message}")


def of_status(status: str, message: str) -> KVError:
    """Return the error that has this status."""
    return _BY_STATUS.get(status, TransferFailed)(message)
