"""Actions of a source, in either role: lease spans that are cached here to a taker."""

from baton.service.codec import deadline_of, key_to_proto
from baton.v1 import worker_pb2 as pb
from baton.worker.legs.leg import Leg, Owed
from baton.worker.session.leg_machine import LegMachine
from baton.worker.session.opening import check_key
from baton.worker.wire import end_status, messages
from kvtransfer.errors import LeaseExpired
from kvtransfer.layout import Taker
from kvtransfer.naming import SPAN_TOKENS
from kvtransfer.transfer.leases import LeaseEnding


def offer(machine: LegMachine, leg: Leg, message: pb.Offer) -> None:
    """Lease a chain of spans, or answer NotHere. A draining worker does this too, because other workers take its
    requests over and ask for their KV."""
    check_key(leg)
    machine.set_deadline(leg, deadline_of(message.budget_ms))
    taker = machine.handoff.taker_of(message.taker)
    if message.WhichOneof("what") == "lease_id":
        _offer_again(machine, leg, message.lease_id, taker)
        return
    hashes = messages.chain_of(message.spans)
    acceptance = machine.engine.admission.offer(leg.key, hashes)
    if acceptance.blocks:
        leg.owed.add(Owed.ENGINE)
    if acceptance.num_cached_tokens < len(hashes) * SPAN_TOKENS:
        leg.num_matched_tokens = acceptance.num_cached_tokens
        machine.stop(leg, end_status.OK)
        return
    _reply_offered(leg, machine.handoff.lease_chain(leg, acceptance, hashes, taker, machine.lease_ended))


def _offer_again(machine: LegMachine, leg: Leg, lease_id: bytes, taker: Taker) -> None:
    """Offer another leg's lease to one more taker."""
    try:
        ticketed = machine.handoff.lease_again(leg, lease_id, taker, machine.lease_ended)
    except LeaseExpired:
        leg.num_matched_tokens = 0
        machine.stop(leg, end_status.OK)
    else:
        _reply_offered(leg, ticketed)


def _reply_offered(leg: Leg, ticketed: dict[str, bytes]) -> None:
    leg.owed.add(Owed.LEASE)
    leg.outbox.reply(pb.Event(offered=pb.Offered(key=key_to_proto(leg.key), **ticketed)))


def renew(machine: LegMachine, leg: Leg, message: pb.RenewLease) -> None:
    machine.handoff.renew(leg, message.lease_id)


def end_lease(machine: LegMachine, leg: Leg, ending: LeaseEnding) -> None:
    """Free the blocks of a lease that is over."""
    leg.status = end_status.LEASE_OVER[ending]
    machine.engine.admission.release_lease(leg.key)
    machine.settle(leg)
