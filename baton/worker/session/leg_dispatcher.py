"""Turn gateways' commands, the engine's outputs and ends of sessions into events of the legs that they concern.

Called in the event loop. Calls of the engine's ledger return without waiting; the engine's outputs come in batches."""

from collections.abc import Sequence

from baton.engine.core.request import Key, Output, PrefillDone, Progress, TokenRun
from baton.service.codec import key_from_proto
from baton.v1 import worker_pb2 as pb
from baton.worker.legs.leg import Leg, Owed
from baton.worker.legs.states import OPENING, LegEvent
from baton.worker.session.endings import refuse_in_use
from baton.worker.session.leg_machine import LegMachine
from baton.worker.wire.outbox import Outbox

_EVENTS = {
    "admit": LegEvent.ADMIT,
    "fetch": LegEvent.FETCH,
    "start": LegEvent.START,
    "offer": LegEvent.OFFER,
    "cancel": LegEvent.CANCEL,
    "renew_lease": LegEvent.RENEW,
}


class LegDispatcher:
    """Find the leg of each command and output, and dispatch the event to it."""

    def __init__(self, machine: LegMachine):
        self.legs = machine.legs
        self._machine = machine

    @property
    def is_draining(self) -> bool:
        return self._machine.is_draining

    def dispatch(self, outbox: Outbox, command: pb.Command) -> None:
        """Dispatch one command with a key, from the session of `outbox`."""
        kind = command.WhichOneof("kind")
        message = getattr(command, kind)
        if kind == "attach":  # it may concern a leg of another session
            self._attach(outbox, message)
            return
        if kind == "prefill":
            event = LegEvent.PREFILL if message.HasField("taker") else LegEvent.PREFILL_HERE
        else:
            event = _EVENTS[kind]
        key = Key(*key_from_proto(message.key))
        leg = self.legs.get(key) or Leg(key, outbox)
        if leg.key not in self.legs and self.legs.is_taken(key):  # the engine's key of a leg that was renamed
            if event in OPENING:
                refuse_in_use(self._machine, leg, message)
        elif leg.outbox is outbox:
            self._machine.happen(leg, event, message)
        elif event in OPENING:  # another gateway has a leg with this key, which is left alone
            refuse_in_use(self._machine, Leg(key, outbox), message)

    def on_outputs(self, outputs: Sequence[Output]) -> None:
        """Dispatch the outputs of one step of the engine."""
        for output in outputs:
            leg = self.legs.of_engine(output.key)
            if leg is None:
                continue
            if isinstance(output, TokenRun):
                self._machine.happen(leg, LegEvent.TOKENS, output)
            elif isinstance(output, Progress):
                self._machine.happen(leg, LegEvent.PROGRESS, output)
            elif isinstance(output, PrefillDone):
                self._machine.happen(leg, LegEvent.PREFILL_DONE, output)
            else:
                leg.owed.discard(Owed.ENGINE)
                leg.report = output.report
                self._machine.happen(leg, LegEvent.ENGINE_ENDED, output)

    def on_stream_lost(self, outbox: Outbox) -> None:
        """Park the decoding legs of a lost session, for a gateway that attaches; cancel its other legs."""
        for leg in self.legs.of_session(outbox):
            leg.is_stream_lost = True
            self._machine.happen(leg, LegEvent.STREAM_LOST)

    def on_read(self, key: Key) -> None:
        """Resume a sequence that had too many unread tokens, which the gateway has now read."""
        if (leg := self.legs.get(key)) is not None:
            self._machine.happen(leg, LegEvent.READ)

    def start_draining(self) -> None:
        """Refuse new requests from now on."""
        self._machine.is_draining = True
        self._machine.on_change()

    def on_grace_over(self) -> None:
        """End every leg that still runs."""
        for leg in list(self.legs.values()):
            self._machine.happen(leg, LegEvent.GRACE_OVER)

    def _attach(self, outbox: Outbox, attach: pb.Attach) -> None:
        """Dispatch an Attach to a new, absent leg, whose action looks for the leg that is meant."""
        leg = Leg(Key(*key_from_proto(attach.key)), outbox)
        if self.legs.is_taken(leg.key):
            refuse_in_use(self._machine, leg, attach)
        else:
            self._machine.happen(leg, LegEvent.ATTACH, (outbox, attach))
