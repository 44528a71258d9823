"""Build the transition table of legs: the rows of all workers, joined with those of the two roles."""

from collections.abc import Iterable
from importlib import import_module

from baton.protocol import ROLES
from baton.worker.legs.states import LIVE, OPENED, OPENING, LegEvent, LegState
from baton.worker.session import endings, offers
from baton.worker.session.leg_machine import LegTransition, Table


def load_table() -> Table:
    """Return the table of every worker, whichever role it starts in: it obeys the commands of both roles. Imports the
    packages of both roles by name, since they stand above this one."""
    return join_tables(*(import_module(f"{role}_worker.states").TRANSITIONS for role in ROLES))


def join_tables(*roles: Table) -> Table:
    """Return the whole table, with a transition for each state and event. Raises ValueError if two roles define one
    cell."""
    s = LegState
    table = {(state, event): LegTransition(endings.ignore, state) for state in s for event in LegEvent}
    table |= _all_workers()
    taken: set[tuple[LegState, LegEvent]] = set()
    for rows in roles:
        if twice := taken & rows.keys():
            raise ValueError(f"two roles say what follows: {_names(twice)}")
        taken |= rows.keys()
        table |= rows
    return table


def _all_workers() -> dict[tuple[LegState, LegEvent], LegTransition]:
    s, e, go = LegState, LegEvent, LegTransition
    table: dict[tuple[LegState, LegEvent], LegTransition] = {}
    # An opening command with the key of a live leg is refused. Any other command that its state does not allow ends it.
    for state in (*LIVE, s.ENDING):
        table |= {(state, event): go(endings.refuse_in_use, state) for event in OPENING}
    for state in LIVE:
        table |= {(state, event): go(endings.end_misplaced, s.ENDING) for event in (e.FETCH, e.START)}
        table[state, e.CANCEL] = go(endings.end_cancelled, s.ENDING)
        table[state, e.ENGINE_ENDED] = go(endings.end_with_engine, s.ENDING)
        table[state, e.STREAM_LOST] = go(endings.end_stream_lost, s.ENDING)
        table[state, e.DEADLINE] = go(endings.end_deadline, s.ENDING)
        table[state, e.GRACE_OVER] = go(endings.end_draining, s.ENDING)
        table[state, e.STOP] = go(endings.end, s.ENDING)
    for state in OPENED:
        table[state, e.REFUSED] = go(endings.refuse, s.ABSENT)
    table |= {
        (s.ABSENT, e.OFFER): go(offers.offer, s.HELD, (s.ENDING,)),
        (s.HELD, e.RENEW): go(offers.renew, s.HELD),
        (s.HELD, e.LEASE_OVER): go(offers.end_lease, s.ENDING),
        # The taker may still be fetching: the lease expires by itself.
        (s.HELD, e.STREAM_LOST): go(endings.ignore, s.HELD),
        # Parts give back what they hold of the leg; the last one removes it.
        (s.ENDING, e.FETCHED): go(endings.settle, s.ENDING),
        (s.ENDING, e.FETCH_FAILED): go(endings.settle, s.ENDING),
        (s.ENDING, e.LEASE_OVER): go(endings.give_back_rest, s.ENDING),
        (s.ENDING, e.ENGINE_ENDED): go(endings.settle, s.ENDING),
        (s.ENDING, e.STOP): go(endings.end, s.ENDING),
        (s.ENDING, e.ALL_BACK): go(endings.report_end, s.ABSENT),
    }
    return table


def _names(cells: Iterable[tuple[LegState, LegEvent]]) -> str:
    return ", ".join(sorted(f"{event.value} in {state.value}" for state, event in cells))
