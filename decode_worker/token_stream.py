"""Actions of the tokens that a step gives to a leg: to the gateway, and into the record for one that attaches later."""

from dataclasses import replace

from baton import failpoints
from baton.engine.core.request import TokenRun
from baton.worker.legs.leg import Leg
from baton.worker.legs.states import LegEvent
from baton.worker.session.lifecycle import Lifecycle


def stream_tokens(lifecycle: Lifecycle, leg: Leg, run: TokenRun) -> None:
    """Write tokens to the gateway; park the sequence when too many of them are unread."""
    if not _write(lifecycle, leg, run):
        lifecycle.happen(leg, LegEvent.UNREAD)


def stream_last_tokens(lifecycle: Lifecycle, leg: Leg, run: TokenRun) -> None:
    """Write tokens of the step that was under way when the leg parked."""
    _write(lifecycle, leg, run)


def record_tokens(lifecycle: Lifecycle, leg: Leg, run: TokenRun) -> None:
    """Keep tokens of the step that was under way when the stream was lost."""
    failpoints.hit("decode.tokens")
    leg.num_output_tokens += len(run.token_ids)
    leg.record.add(run)


def _write(lifecycle: Lifecycle, leg: Leg, run: TokenRun) -> bool:
    """Return whether there is room for more."""
    record_tokens(lifecycle, leg, run)
    return leg.outbox.add_run(run if run.key == leg.key else replace(run, key=leg.key))
