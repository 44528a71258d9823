"""Count the entries of each table of a worker. All counts return to zero when no request is open; any other is a
leak."""

from collections import Counter
from dataclasses import dataclass

from baton.engine.engine import Engine
from baton.worker.kv.handoff import Leaseholders
from baton.worker.kv.intake import Intake
from baton.worker.session.leg_dispatcher import LegDispatcher
from baton.worker.session.sessions import Sessions
from kvtransfer.transfer.source import Source


@dataclass(frozen=True, slots=True)
class Tables:
    """The tables of a worker."""

    engine: Engine
    dispatcher: LegDispatcher
    holders: Leaseholders
    intake: Intake
    source: Source
    sessions: Sessions

    def counts(self) -> dict[str, int]:
        """Return the entries by table; legs also by state, for states that have any."""
        legs = self.dispatcher.legs.values()
        by_state = Counter(leg.state.value for leg in legs)
        return {
            "keys": len(legs),
            **{f"keys_{state}": count for state, count in sorted(by_state.items())},
            "token_records": sum(leg.record is not None for leg in legs),
            "engine_keys": len(self.engine.admission.groups),
            "promised_blocks": self.engine.ledger.num_reserved,
            "quarantined_blocks": self.engine.ledger.counts()["quarantined"],
            "leases": self.source.num_leases,
            "lease_owners": self.holders.num_owners,
            "lease_guests": self.holders.num_guests,
            "tickets": self.source.num_tickets,
            "fetches": self.intake.num_fetches,
            "kv_connections": self.source.num_connections,
            "unwritten": sum(outbox.num_unwritten for outbox in self.sessions.outboxes),
        }
