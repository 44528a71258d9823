"""What a key may be doing on a worker, what may happen to it, and what follows: one table, every cell of it tested.

    decode    absent ─ admit ─► admitted ─ fetch ─► fetching ─ fetched ─► fetched ─ start ─► running ─► ending ─► absent
                                   │                   └─ start ─► starting ─ fetched ─────────►┘
                                   └─ prefill here ────────────────────────────────────────────►┘
    prefill   absent ─ prefill ─► prefilling ─ prefill done ─► held ─ lease over ─► ending ─► absent
    source    absent ─ offer ───────────────────────────────► held
    parking   running ─ unread ─► parked ─ read ─► running;  ─ stream lost ─► orphaned ─ attach ─► running

Whatever else happens leads to `ending`: everything is given back there, and with the last of it goes the one Ended.
"""

from enum import Enum
from typing import NamedTuple


class State(Enum):
    ABSENT = "absent"
    ADMITTED = "admitted"  # a grant: credit, cached prefix pinned
    FETCHING = "fetching"  # KV is on its way here
    STARTING = "starting"  # the same, and the first tokens are known
    FETCHED = "fetched"  # every block is verified
    RUNNING = "running"  # the loop decodes it, or prefills and decodes it
    PARKED = "parked"  # its tokens are unread: the loop computes none until the gateway reads on
    ORPHANED = "orphaned"  # parked, and its stream is lost: somebody may attach, for a while
    PREFILLING = "prefilling"  # for a taker
    HELD = "held"  # KV complete, leased
    ENDING = "ending"  # its status is known, something of it is still out


class Event(Enum):
    # commands
    ADMIT = "admit"
    PREFILL = "prefill"  # for a taker
    PREFILL_HERE = "prefill here"
    FETCH = "fetch"
    START = "start"
    OFFER = "offer"
    ATTACH = "attach"  # on another stream, by another attempt's key
    RENEW = "renew lease"
    CANCEL = "cancel"
    # happenings
    PROGRESS = "progress"  # of a prefill for a taker
    PREFILL_DONE = "prefill done"
    FETCHED = "fetched"
    FETCH_FAILED = "fetch failed"  # peer lost, ticket refused, digest wrong, time out, given up
    LEASE_OVER = "lease over"  # taken to the end, expired, or given up
    ENGINE_ENDED = "engine ended"  # finished, failed, its deadline, or given up
    STREAM_LOST = "stream lost"
    DEADLINE = "deadline"
    WINDOW_OVER = "window over"  # nobody came to attach
    UNREAD = "unread"  # the gateway does not read
    READ = "read"  # it does again
    GRACE_OVER = "grace over"  # the worker must go


class Cell(NamedTuple):
    """`action` is a method of Actions; the key moves to `state` before it runs."""

    action: str
    state: State


OPENING = (Event.ADMIT, Event.PREFILL, Event.PREFILL_HERE, Event.OFFER)
COMMANDS = (*OPENING, Event.FETCH, Event.START, Event.ATTACH, Event.RENEW, Event.CANCEL)
_DECODING = (State.RUNNING, State.PARKED, State.ORPHANED)
_LIVE = (State.ADMITTED, State.FETCHING, State.STARTING, State.FETCHED, *_DECODING, State.PREFILLING, State.HELD)


def _table() -> dict[tuple[State, Event], Cell]:
    s, e = State, Event
    table = {(state, event): Cell("ignore", state) for state in s for event in e}
    # Another leg's name: the one that has it is not touched. A command with no place in a live key's state ends it.
    for state in (*_LIVE, s.ENDING):
        table |= {(state, event): Cell("refuse_in_use", state) for event in OPENING}
    for state in _LIVE:
        table |= {(state, event): Cell("end_misplaced", s.ENDING) for event in (e.FETCH, e.START)}
        table[state, e.CANCEL] = Cell("end_cancelled", s.ENDING)
        table[state, e.ENGINE_ENDED] = Cell("end_with_engine", s.ENDING)
        table[state, e.STREAM_LOST] = Cell("end_stream_lost", s.ENDING)
        table[state, e.DEADLINE] = Cell("end_deadline", s.ENDING)
        table[state, e.GRACE_OVER] = Cell("end_draining", s.ENDING)
    for state in (s.FETCHING, s.STARTING):
        table[state, e.FETCH_FAILED] = Cell("end_fetch_failed", s.ENDING)
    table |= {
        (s.ABSENT, e.ADMIT): Cell("admit", s.ADMITTED),
        (s.ABSENT, e.PREFILL): Cell("prefill", s.PREFILLING),
        (s.ABSENT, e.PREFILL_HERE): Cell("prefill_here", s.RUNNING),
        (s.ABSENT, e.OFFER): Cell("offer", s.HELD),
        (s.ABSENT, e.ATTACH): Cell("not_here", s.ABSENT),
        (s.ADMITTED, e.PREFILL_HERE): Cell("prefill_here", s.RUNNING),
        (s.ADMITTED, e.FETCH): Cell("fetch", s.FETCHING),
        (s.FETCHING, e.START): Cell("keep_first_tokens", s.STARTING),
        (s.FETCHING, e.FETCHED): Cell("report_fetched", s.FETCHED),
        (s.STARTING, e.FETCHED): Cell("start_fetched", s.RUNNING),
        (s.FETCHED, e.START): Cell("start", s.RUNNING),
        (s.FETCHED, e.PREFILL_HERE): Cell("prefill_here", s.RUNNING),  # what a chain of spans left to compute
        (s.RUNNING, e.PREFILL_DONE): Cell("report_done", s.RUNNING),
        (s.RUNNING, e.UNREAD): Cell("park", s.PARKED),
        (s.PARKED, e.READ): Cell("resume", s.RUNNING),
        (s.RUNNING, e.STREAM_LOST): Cell("orphan", s.ORPHANED),
        (s.PARKED, e.STREAM_LOST): Cell("orphan", s.ORPHANED),
        (s.RUNNING, e.ATTACH): Cell("attach", s.RUNNING),  # its own session is not known to be dead yet
        (s.PARKED, e.ATTACH): Cell("attach", s.RUNNING),
        (s.ORPHANED, e.ATTACH): Cell("attach", s.RUNNING),
        (s.ORPHANED, e.ENGINE_ENDED): Cell("keep_end", s.ORPHANED),
        (s.ORPHANED, e.WINDOW_OVER): Cell("end_forgotten", s.ENDING),
        (s.ORPHANED, e.STREAM_LOST): Cell("ignore", s.ORPHANED),
        (s.HELD, e.STREAM_LOST): Cell("ignore", s.HELD),  # the taker may be fetching: the lease has a clock of its own
        (s.PREFILLING, e.FETCHED): Cell("compute_rest", s.PREFILLING),  # a prefix that lay elsewhere
        (s.PREFILLING, e.FETCH_FAILED): Cell("pull_prefix", s.PREFILLING),  # from the next that has it, or not at all
        (s.PREFILLING, e.RENEW): Cell("renew", s.PREFILLING),
        (s.PREFILLING, e.PROGRESS): Cell("advance", s.PREFILLING),
        (s.PREFILLING, e.PREFILL_DONE): Cell("hold", s.HELD),
        (s.PREFILLING, e.LEASE_OVER): Cell("end_lease_lost", s.ENDING),
        (s.HELD, e.RENEW): Cell("renew", s.HELD),
        (s.HELD, e.LEASE_OVER): Cell("end_lease", s.ENDING),
        # What is still out comes home; the last of it lets the key end.
        (s.ENDING, e.FETCHED): Cell("settle", s.ENDING),
        (s.ENDING, e.FETCH_FAILED): Cell("settle", s.ENDING),
        (s.ENDING, e.LEASE_OVER): Cell("settle", s.ENDING),
        (s.ENDING, e.ENGINE_ENDED): Cell("settle", s.ENDING),
    }
    return table


TABLE = _table()


def state_table_markdown() -> str:
    """The table for people: a row an event, a column a state. `x → y`: action and next state, `·`: nothing happens."""
    head = ["", *(state.value for state in State)]
    lines = [head, ["---"] * len(head)]
    for event in Event:
        cells = (_cell_text(state, TABLE[state, event]) for state in State)
        lines.append([f"**{event.value}**", *cells])
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def _cell_text(state: State, cell: Cell) -> str:
    if cell.action == "ignore":
        return "·"
    action = cell.action.replace("_", " ")
    return action if cell.state is state else f"{action} → {cell.state.value}"
