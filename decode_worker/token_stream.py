"""Actions of the tokens that a step computes: send them to the gateway, and record them for one that attaches later."""

from dataclasses import replace

from baton import failpoints
from baton.engine.core.request import TokenRun
from baton.worker.legs.leg import Leg
from baton.worker.legs.states import LegEvent
from baton.worker.session.leg_machine import LegMachine


def stream_tokens(machine: LegMachine, leg: Leg, run: TokenRun) -> None:
    """Send tokens to the gateway; park the sequence if too many of them are unread."""
    if not _write(machine, leg, run):
        machine.happen(leg, LegEvent.UNREAD)


def stream_last_tokens(machine: LegMachine, leg: Leg, run: TokenRun) -> None:
    """Send the tokens of the step that was under way when the leg parked."""
    _write(machine, leg, run)


def record_tokens(machine: LegMachine, leg: Leg, run: TokenRun) -> None:
    """Record tokens; for an orphaned leg, those of the step that was under way when its stream was lost."""
    failpoints.hit("decode.tokens")
    leg.num_output_tokens += len(run.token_ids)
    leg.record.add(run)


def _write(machine: LegMachine, leg: Leg, run: TokenRun) -> bool:
    """Send tokens; return False if too many are unread."""
    record_tokens(machine, leg, run)
    return leg.outbox.add_run(run if run.key == leg.key else replace(run, key=leg.key))
