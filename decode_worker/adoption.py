"""Actions that adopt a prompt's KV: fetch it, and start decoding when all of it is verified and the first tokens are
known, in whichever order."""

import time

from baton import failpoints
from baton.v1 import worker_pb2 as pb
from baton.worker.legs.leg import Leg, Owed
from baton.worker.legs.token_record import TokenRecord
from baton.worker.session.leg_machine import LegMachine
from baton.worker.wire import messages
from kvtransfer.transfer.fetcher import FetchReport


def fetch(machine: LegMachine, leg: Leg, message: pb.Fetch) -> None:
    """Begin to pull the KV that the handle names."""
    leg.times.fetch_at = time.monotonic()
    machine.intake.begin(leg, message.handle, message.ticket, machine.fetch_ended)
    leg.owed.add(Owed.FETCH)


def report_fetched(machine: LegMachine, leg: Leg, report: FetchReport) -> None:
    leg.outbox.reply(messages.fetched(leg.key, report))


def keep_first_tokens(machine: LegMachine, leg: Leg, message: pb.Start) -> None:
    """Keep the first tokens until the KV is here. Raises ValueError for tokens or choices that do not exist."""
    leg.times.start_at = time.monotonic()
    num_choices, vocab_size = leg.request.sampling.n, machine.engine.spec.vocab_size
    leg.first_tokens = messages.first_tokens_of(message.first_tokens, num_choices, vocab_size)


def start(machine: LegMachine, leg: Leg, message: pb.Start) -> None:
    keep_first_tokens(machine, leg, message)
    _decode(machine, leg)


def start_fetched(machine: LegMachine, leg: Leg, report: FetchReport) -> None:
    """Start a leg that waited for its KV."""
    report_fetched(machine, leg, report)
    leg.times.kv_wait_s = time.monotonic() - leg.times.start_at
    _decode(machine, leg)


def _decode(machine: LegMachine, leg: Leg) -> None:
    """Let the leg join the batch."""
    failpoints.hit("decode.start")
    try:
        leg.record = TokenRecord(leg.request, leg.first_tokens)
        machine.engine.admission.start(leg.key, leg.first_tokens)
    except LookupError:  # the engine has just ended it; its RequestEnded, with the reason, follows
        machine.stop(leg, None)
    machine.on_change()
