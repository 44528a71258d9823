"""Actions of a prompt that is read here for a taker: accept it, pull a prefix from other workers, let the taker follow
the computation, and hold its KV until the lease is over."""

import logging
import time
from functools import partial

from baton import failpoints
from baton.engine.core.request import PrefillDone, Progress
from baton.service.codec import key_to_proto
from baton.service.logs import fields
from baton.v1 import worker_pb2 as pb
from baton.worker.legs.leg import Leg, Owed
from baton.worker.session.leg_machine import LegMachine
from baton.worker.session.opening import compute_rest, open_request
from baton.worker.wire import end_status, messages
from baton.worker.wire.end_status import Status
from kvtransfer.transfer.leases import LeaseEnding

log = logging.getLogger(__name__)


def prefill(machine: LegMachine, leg: Leg, message: pb.Prefill) -> None:
    """Allocate blocks for the whole prompt, lease them to the taker, and begin to compute or to pull."""
    request = open_request(machine, leg, message.spec)
    taker = machine.handoff.taker_of(message.taker)
    leg.sources = [(source.handle, source.ticket) for source in message.sources]
    acceptance = machine.engine.admission.accept(request, bool(leg.sources))
    leg.owed.add(Owed.ENGINE)
    leg.times.prefill_at = time.monotonic()
    leg.num_cached_tokens = acceptance.num_cached_tokens
    ticketed = machine.handoff.lease_prompt(leg, acceptance, taker, machine.lease_ended)
    leg.owed.add(Owed.LEASE)
    accepted = pb.Accepted(key=key_to_proto(leg.key), num_cached_tokens=acceptance.num_cached_tokens, **ticketed)
    leg.outbox.reply(pb.Event(accepted=accepted))
    if leg.sources:
        pull_prefix(machine, leg, None)
    machine.on_change()


def pull_prefix(machine: LegMachine, leg: Leg, status: Status | None) -> None:
    """Pull from the next usable source, or compute what no source has given. `status`: why the last source failed."""
    if status is not None:
        leg.pull_failure = status
        log.warning("prefix not pulled %s", fields(key=leg.key, reason=status.message))
    leg.times.fetch_at = leg.times.fetch_at or time.monotonic()
    if machine.intake.begin_prefix(leg, machine.fetch_ended, partial(machine.handoff.advance, leg)):
        leg.owed.add(Owed.FETCH)
    else:
        compute_rest(machine, leg, None)


def advance(machine: LegMachine, leg: Leg, progress: Progress) -> None:
    """Raise the watermark that the taker follows."""
    machine.handoff.advance(leg, progress.upto_token, progress.upto_layer)


def hold(machine: LegMachine, leg: Leg, done: PrefillDone) -> None:
    """Report the first tokens, and keep the KV until its taker has all of it."""
    leg.prefill_done = done
    failpoints.hit("prefill.done")
    pulled = None
    if leg.times.fetch_ended_at is not None:
        why = leg.pull_failure or end_status.OK
        pulled = pb.Pulled(num_tokens=leg.num_pulled_tokens, reason=why.reason, failure=why.message)
    leg.outbox.reply(messages.done(leg.key, done, pulled))  # before the lease moves: a client waits for the first token
    machine.handoff.finish(leg)
    machine.on_change()


def end_lease_lost(machine: LegMachine, leg: Leg, ending: LeaseEnding) -> None:
    """End a prompt whose lease has expired while it was read."""
    machine.give_back(leg, end_status.LEASE_EXPIRED)
