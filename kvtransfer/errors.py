"""Errors of KV transfers, one class per cause; an End frame carries `status`."""


class KVError(Exception):
    """Base of all errors of a transfer. Nothing of the failed range is verified, so none of it may be attended to."""

    status = "internal"


class LayoutMismatch(KVError):
    """The two sides keep KV in different shapes or numerics classes; the message prints both."""

    status = "layout_mismatch"


class TicketRefused(KVError):
    """The ticket is forged, damaged, withdrawn, or was minted for another taker."""

    status = "ticket_refused"


class LeaseExpired(KVError):
    """The source no longer keeps these blocks for the taker."""

    status = "lease_expired"


class TransferCancelled(KVError):
    """The other side cancelled the transfer."""

    status = "cancelled"


class DigestMismatch(KVError):
    """The bytes that arrived are not the bytes that the source digested, or no digest came with them."""

    status = "digest_mismatch"


class StaleBlocks(KVError):
    """Blocks were reused, or the process that holds them restarted, during the transfer."""

    status = "stale_blocks"


class ProtocolError(KVError):
    """A frame is malformed, out of turn, or names tokens, layers or blocks that do not exist."""

    status = "protocol_error"


class TransferFailed(KVError):
    """The transfer cannot continue, though the bytes of both sides are right."""

    status = "internal"


class PeerLost(TransferFailed):
    """The connection broke, or the other side was silent for too long. The same ticket may be used to continue."""

    status = "peer_lost"


class TransportBroken(PeerLost):
    """`transport` does not work between these two workers, although both offer it; another transport may."""

    def __init__(self, transport: str, message: str):
        super().__init__(message)
        self.transport = transport


class DeviceHangs(TransferFailed):
    """A copy may still be writing and cannot be stopped. This process must not use its blocks again, so it has to
    end."""


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


def received_error(status: str, message: str) -> KVError:
    """Return the error that the other side's End names."""
    return error_of(status, f"the other side ended with {status}: {message}")


def error_of(status: str, message: str) -> KVError:
    """Return the error that has this status."""
    return _BY_STATUS.get(status, TransferFailed)(message)
