"""Define the states and events of a group of sequences in the engine. lifecycle.py has the transitions.

    new ─ admit ──────────► fetching ─ start, compute rest ─► waiting ─ launch, join ─► running ──► finished
     ├─── accept prefix ───►┘                                    ▲                     │   │  ▲
     ├─── accept ───────────────────────────────────────────────►┘                hold │   │  └ resume ─┐
     └─── offer ──────────────────────────────────────────────────────────────► held ◄─┘   └ park ─► parked

Any live state leads to `finished`: by its end, its deadline, a cancellation or the release of its lease.
"""

from enum import Enum


class GroupState(Enum):
    NEW = "new"  # not registered under its key yet
    FETCHING = "fetching"  # its prompt, or a prefix of it, is on its way here
    WAITING = "waiting"  # in the loop, no chunk launched yet
    RUNNING = "running"  # in the loop: its prompt is being computed, or its choices decode
    HELD = "held"  # KV complete, leased to a taker
    PARKED = "parked"  # nobody reads the answer: no blocks, its tokens stay
    FINISHED = "finished"


class GroupEvent(Enum):
    # opening
    ADMIT = "admit"
    ACCEPT = "accept"  # a prefill for a taker
    ACCEPT_PREFIX = "accept prefix"  # a prefill for a taker whose prefix is fetched first
    OFFER = "offer"  # lease cached blocks
    # on any thread
    FETCH = "fetch"  # bytes may land from now on
    SKIP = "skip"  # begin the fetch after the blocks outside every window
    SET_ASIDE = "set aside"
    VERIFY = "verify"
    START = "start"  # its first tokens were drawn on another worker
    COMPUTE_REST = "compute rest"  # compute the tokens that were not fetched
    RELEASE_LEASE = "release lease"
    CANCEL = "cancel"
    # on the loop's thread
    ENTER = "enter"  # its prompt is to be computed
    JOIN = "join"  # its choices are to be decoded
    LAUNCH = "launch"  # its first chunk is launched
    HOLD = "hold"  # its prompt is computed, for a taker
    PARK = "park"
    RESUME = "resume"
    DEADLINE = "deadline"
    END = "end"
