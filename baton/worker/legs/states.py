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


class KeyState(Enum):
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


class KeyEvent(Enum):
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


class KeyTransition(NamedTuple):
    """`action` is a method of Actions; the key moves to `state` before it runs."""

    action: str
    state: KeyState


OPENING = (KeyEvent.ADMIT, KeyEvent.PREFILL, KeyEvent.PREFILL_HERE, KeyEvent.OFFER)
COMMANDS = (*OPENING, KeyEvent.FETCH, KeyEvent.START, KeyEvent.ATTACH, KeyEvent.RENEW, KeyEvent.CANCEL)
_DECODING = (KeyState.RUNNING, KeyState.PARKED, KeyState.ORPHANED)
_LIVE = (
    KeyState.ADMITTED,
    KeyState.FETCHING,
    KeyState.STARTING,
    KeyState.FETCHED,
    *_DECODING,
    KeyState.PREFILLING,
    KeyState.HELD,
)


def _table() -> dict[tuple[KeyState, KeyEvent], KeyTransition]:
    s, e = KeyState, KeyEvent
    table = {(state, event): KeyTransition("ignore", state) for state in s for event in e}
    # Another leg's name: the one that has it is not touched. A command with no place in a live key's state ends it.
    for state in (*_LIVE, s.ENDING):
        table |= {(state, event): KeyTransition("refuse_in_use", state) for event in OPENING}
    for state in _LIVE:
        table |= {(state, event): KeyTransition("end_misplaced", s.ENDING) for event in (e.FETCH, e.START)}
        table[state, e.CANCEL] = KeyTransition("end_cancelled", s.ENDING)
        table[state, e.ENGINE_ENDED] = KeyTransition("end_with_engine", s.ENDING)
        table[state, e.STREAM_LOST] = KeyTransition("end_stream_lost", s.ENDING)
        table[state, e.DEADLINE] = KeyTransition("end_deadline", s.ENDING)
        table[state, e.GRACE_OVER] = KeyTransition("end_draining", s.ENDING)
    for state in (s.FETCHING, s.STARTING):
        table[state, e.FETCH_FAILED] = KeyTransition("end_fetch_failed", s.ENDING)
    table |= {
        (s.ABSENT, e.ADMIT): KeyTransition("admit", s.ADMITTED),
        (s.ABSENT, e.PREFILL): KeyTransition("prefill", s.PREFILLING),
        (s.ABSENT, e.PREFILL_HERE): KeyTransition("prefill_here", s.RUNNING),
        (s.ABSENT, e.OFFER): KeyTransition("offer", s.HELD),
        (s.ABSENT, e.ATTACH): KeyTransition("not_here", s.ABSENT),
        (s.ADMITTED, e.PREFILL_HERE): KeyTransition("prefill_here", s.RUNNING),
        (s.ADMITTED, e.FETCH): KeyTransition("fetch", s.FETCHING),
        (s.FETCHING, e.START): KeyTransition("keep_first_tokens", s.STARTING),
        (s.FETCHING, e.FETCHED): KeyTransition("report_fetched", s.FETCHED),
        (s.STARTING, e.FETCHED): KeyTransition("start_fetched", s.RUNNING),
        (s.FETCHED, e.START): KeyTransition("start", s.RUNNING),
        (s.FETCHED, e.PREFILL_HERE): KeyTransition("prefill_here", s.RUNNING),  # what a chain of spans left to compute
        (s.RUNNING, e.PREFILL_DONE): KeyTransition("report_done", s.RUNNING),
        (s.RUNNING, e.UNREAD): KeyTransition("park", s.PARKED),
        (s.PARKED, e.READ): KeyTransition("resume", s.RUNNING),
        (s.RUNNING, e.STREAM_LOST): KeyTransition("orphan", s.ORPHANED),
        (s.PARKED, e.STREAM_LOST): KeyTransition("orphan", s.ORPHANED),
        (s.RUNNING, e.ATTACH): KeyTransition("attach", s.RUNNING),  # its own session is not known to be dead yet
        (s.PARKED, e.ATTACH): KeyTransition("attach", s.RUNNING),
        (s.ORPHANED, e.ATTACH): KeyTransition("attach", s.RUNNING),
        (s.ORPHANED, e.ENGINE_ENDED): KeyTransition("keep_end", s.ORPHANED),
        (s.ORPHANED, e.WINDOW_OVER): KeyTransition("end_forgotten", s.ENDING),
        (s.ORPHANED, e.STREAM_LOST): KeyTransition("ignore", s.ORPHANED),
        (s.HELD, e.STREAM_LOST): KeyTransition(
            "ignore", s.HELD
        ),  # the taker may be fetching: the lease has a clock of its own
        (s.PREFILLING, e.FETCHED): KeyTransition("compute_rest", s.PREFILLING),  # a prefix that lay elsewhere
        (s.PREFILLING, e.FETCH_FAILED): KeyTransition(
            "pull_prefix", s.PREFILLING
        ),  # from the next that has it, or not at all
        (s.PREFILLING, e.RENEW): KeyTransition("renew", s.PREFILLING),
        (s.PREFILLING, e.PROGRESS): KeyTransition("advance", s.PREFILLING),
        (s.PREFILLING, e.PREFILL_DONE): KeyTransition("hold", s.HELD),
        (s.PREFILLING, e.LEASE_OVER): KeyTransition("end_lease_lost", s.ENDING),
        (s.HELD, e.RENEW): KeyTransition("renew", s.HELD),
        (s.HELD, e.LEASE_OVER): KeyTransition("end_lease", s.ENDING),
        # What is still out comes home; the last of it lets the key end.
        (s.ENDING, e.FETCHED): KeyTransition("settle", s.ENDING),
        (s.ENDING, e.FETCH_FAILED): KeyTransition("settle", s.ENDING),
        (s.ENDING, e.LEASE_OVER): KeyTransition("settle", s.ENDING),
        (s.ENDING, e.ENGINE_ENDED): KeyTransition("settle", s.ENDING),
    }
    return table


TABLE = _table()


def state_table_markdown() -> str:
    """The table for people: a row an event, a column a state. `x → y`: action and next state, `·`: nothing happens."""
    head = ["", *(state.value for state in KeyState)]
    lines = [head, ["---"] * len(head)]
    for event in KeyEvent:
        cells = (_cell_text(state, TABLE[state, event]) for state in KeyState)
        lines.append([f"**{event.value}**", *cells])
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def _cell_text(state: KeyState, cell: KeyTransition) -> str:
    if cell.action == "ignore":
        return "·"
    action = cell.action.replace("_", " ")
    return action if cell.state is state else f"{action} → {cell.state.value}"
