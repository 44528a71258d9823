"""Define the states of a group of sequences in the engine, and its events. lifecycle.py has the transitions.

    new ─ admit ──────────► fetching ─ start, compute rest ─► waiting ─ launch, join ─► running ──► finished
     ├─── accept prefix ───►┘                                    ▲                     │   │  ▲
     ├─── accept ───────────────────────────────────────────────►┘                hold │   │  └ resume ─┐
     └─── offer ──────────────────────────────────────────────────────────────► held ◄─┘   └ park ─► parked

Any live state leads to `finished`: by its end, its deadline, a cancellation or the release of its lease.
"""

from enum import Enum


class GroupState(Enum):
    NEW = "new"  # not known by its key yet
    FETCHING = "fetching"  # its prompt, or a prefix of it, is on its way here
    WAITING = "waiting"  # in the loop, and none of it was launched
    RUNNING = "running"  # in the loop: its prompt is read, or its choices decode
    HELD = "held"  # KV complete, leased to a taker
    PARKED = "parked"  # without a reader: no blocks, its token record stays
    FINISHED = "finished"


class GroupEvent(Enum):
    # opening
    ADMIT = "admit"
    ACCEPT = "accept"  # a prefill for a taker
    ACCEPT_PREFIX = "accept prefix"  # the same, and a part of it is fetched first
    OFFER = "offer"  # what is cached
    # on any thread
    FETCH = "fetch"  # bytes may land from here on
    SKIP = "skip"  # what no token that is computed sees is not fetched
    SET_ASIDE = "set aside"
    VERIFY = "verify"
    START = "start"  # its first tokens were drawn elsewhere
    COMPUTE_REST = "compute rest"  # what no fetch has brought
    RELEASE_LEASE = "release lease"
    CANCEL = "cancel"
    # on the loop's thread
    ENTER = "enter"  # its prompt must be read
    JOIN = "join"  # its choices must be decoded
    LAUNCH = "launch"  # its first chunk
    HOLD = "hold"  # its prompt is read, for a taker
    PARK = "park"
    RESUME = "resume"
    DEADLINE = "deadline"
    END = "end"
