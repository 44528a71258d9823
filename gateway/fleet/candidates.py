"""Serving workers as routing sees them: their reports in Hello and Load, what was sent to them since, and how fast they
have been. A request looks at a bounded number of them."""

import itertools
import random
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Sequence
from typing import NamedTuple

from baton.protocol import DEFAULT_TENANT, ROLES
from baton.service.clock import now
from baton.v1 import worker_pb2 as pb
from gateway.fleet.kv_pair_breakers import KVPairBreakers
from gateway.link.worker_breaker import BreakerState
from gateway.link.worker_link import LinkState, WorkerLink
from gateway.prefix.prefix_matches import Matches
from gateway.routing.routing import (
    NUM_HOLDERS,
    Candidate,
    RoutingRequest,
    WorkerLimits,
    can_decode,
    can_prefill,
    shortlist,
)
from kvtransfer.naming import SPAN_TOKENS

CanHold = Callable[[RoutingRequest, WorkerLimits], bool]
CAN_HOLD: dict[str, CanHold] = {"prefill": can_prefill, "decode": can_decode}
NUM_SEEN = 8 * NUM_HOLDERS  # holders of a prefix that are searched for workers of one role


class _HelloFacts(NamedTuple):
    """The fields of a Candidate that the worker's Hello determines."""

    limits: WorkerLimits
    kv_gives: frozenset[str]
    kv_takes: frozenset[str]
    transports: frozenset[str]
    host_id: str
    kv_token_bytes: int
    match_step: int  # tokens; the worker can reuse a prefix only in multiples of this
    max_sequences: int | None
    kv_layout: bytes
    hello: pb.Hello


class Candidates:
    """The serving workers of one model, and the Candidates that routing chooses from. Belongs to the event loop."""

    def __init__(self, links: Callable[[str], Sequence[WorkerLink]]):
        """`links(role)` returns all workers of a role, serving or not; it is called at each update."""
        self._links = links
        self._rng = random.Random()
        self.kv_pair_breakers = KVPairBreakers()
        self.num_changes = 0  # how often the set of serving workers has changed
        self._serving: dict[str, list[WorkerLink]] = {role: [] for role in ROLES}
        self._roles: dict[WorkerLink, str] = {}
        self._ids: dict[WorkerLink, bytes] = {}
        self._by_id: dict[bytes, WorkerLink] = {}
        self._draining: dict[bytes, WorkerLink] = {}  # workers that drain: they still give KV to others
        self._facts: dict[WorkerLink, _HelloFacts] = {}
        self._unproven: dict[WorkerLink, None] = {}  # serving workers whose breakers are not closed
        self._limits: dict[str, set[WorkerLimits]] = {role: set() for role in ROLES}  # of serving workers

    def update(self, link: WorkerLink) -> None:
        """Note a change of `link`: it may have begun or ceased to serve, or to be trusted."""
        self._note_trust(link)
        if not link.state.has_session:
            self.kv_pair_breakers.forget(link.worker_id)
        if self._draining or link.state is LinkState.DRAINING:
            self._draining = {worker_id: each for worker_id, each in self._draining.items() if each is not link}
            if link.state is LinkState.DRAINING:
                self._draining[link.worker_id] = link
        known = self._facts.get(link)
        if (link.is_serving and link.hello is not None) == (link in self._roles):
            if known is None or known.hello is link.hello:
                return
            del self._facts[link]  # the worker has sent a new Hello
        self._serving = {role: [each for each in self._links(role) if each.is_serving and each.hello] for role in ROLES}
        self._roles = {each: role for role, links in self._serving.items() for each in links}
        self._ids = {each: each.worker_id for each in self._roles}
        self._by_id = {worker_id: each for each, worker_id in self._ids.items()}
        self._facts = {each: self._facts.get(each) or _facts_of(each) for each in self._roles}
        self._limits = {role: {each.limits for each in links} for role, links in self._serving.items()}
        self.num_changes += 1

    def may_come(self, role: str, request: RoutingRequest, within_s: float, task: str = "") -> bool:
        """Return whether a worker of this role may come to serve soon, and could hold the request.

        `task`: the role whose work it is to do, if not its own."""
        can_hold = CAN_HOLD[task or role]
        return any(
            link.may_come(within_s) and (link.limits is None or can_hold(request, link.limits))
            for link in self._links(role)
        )

    def expects_unknown(self, role: str, within_s: float) -> bool:
        """Return whether a worker of this role may come to serve that has never said what it can hold: it may be
        starting, or no attempt to connect to it has failed yet."""
        return any(
            link.limits is None and (link.is_reconnecting or link.may_come(within_s)) for link in self._links(role)
        )

    def _note_trust(self, link: WorkerLink) -> None:
        if link.is_serving and link.breaker.state is not BreakerState.CLOSED:
            self._unproven[link] = None
        else:
            self._unproven.pop(link, None)

    def untrusted(self) -> set[bytes]:
        """Return the ids of workers that are asked only if there are no others.

        Their breakers are open, or they are new and serve a first request while others of their role are proven."""
        if not self._unproven:
            return set()
        at, num_unproven = now(), Counter(map(self._roles.get, self._unproven))
        return {
            link.worker_id
            for link in self._unproven
            if (role := self._roles.get(link)) is not None
            and not link.breaker.allows(at, link.num_asked, num_unproven[role] < len(self._serving[role]))
        }

    def serving(self, role: str) -> Sequence[WorkerLink]:
        """Return the workers of this role that serve."""
        return self._serving[role]

    def shortlisted(
        self,
        role: str,
        request: RoutingRequest,
        matches: Matches,
        avoid: Collection[bytes],
        *,
        everyone: bool = False,
        task: str = "",
    ) -> dict[str, WorkerLink]:
        """Return name -> link of the workers that a request looks at: only those that can hold it, if there are any.

        `everyone`: all serving workers of the role. `task`: the role whose work they are to do, if not their own."""
        can_hold = CAN_HOLD[task or role]
        large = self._large(role, request, can_hold)

        def is_usable(link: WorkerLink) -> bool:
            return self._ids[link] not in avoid

        if everyone:
            return {link.address: link for link in self._serving[role] if is_usable(link)}
        of_role = (link for link in self._holders(matches) if self._roles[link] == role)
        holders = (link for link in of_role if can_hold(request, link.limits))
        return {link.address: link for link in shortlist(holders, large, is_usable, self._rng)}

    def holders(self, matches: Matches, avoid: Collection[bytes]) -> dict[str, WorkerLink]:
        """Return name -> link of the workers of either role with the longest prefixes, serving or draining."""
        found = (
            self._by_id.get(worker_id) or self._draining.get(worker_id)
            for worker_id in itertools.islice(matches, NUM_SEEN)
            if worker_id not in avoid
        )
        return {link.address: link for link in itertools.islice(filter(None, found), NUM_HOLDERS)}

    def as_candidates(
        self, links: Iterable[WorkerLink], matches: Matches, request: RoutingRequest | None = None
    ) -> list[Candidate]:
        """Return the workers as `request` sees them: prompt tokens of other tenants count only as far as they are read
        before those of its own tenant."""
        at = now()
        return [self._candidate(link, matches, at, request) for link in links]

    def _large(self, role: str, request: RoutingRequest, can_hold: CanHold) -> Sequence[WorkerLink]:
        """Return the serving workers of a role that can hold a request, or all of them if none can."""
        serving = self._serving[role]
        if all(can_hold(request, limits) for limits in self._limits[role]):
            return serving
        return [link for link in serving if can_hold(request, link.limits)] or serving

    def _holders(self, matches: Matches) -> Iterable[WorkerLink]:
        for worker_id in itertools.islice(matches, NUM_SEEN):
            if link := self._by_id.get(worker_id):
                yield link

    def _candidate(self, link: WorkerLink, matches: Matches, at: float, request: RoutingRequest | None) -> Candidate:
        """Combine the worker's reports, which are a moment old, with what this gateway has sent since."""
        load, facts = link.load, self._facts.get(link) or _facts_of(link)
        num_tokens = matches.get(self._ids.get(link) or link.worker_id) * SPAN_TOKENS
        return (
            Candidate(  # by position: with keywords this takes 3 us instead of 0.8, and a request looks at 32 workers
                link.address,
                num_tokens - num_tokens % facts.match_step,
                max(load.num_running + load.num_waiting, len(link.legs)),
                _waiting(link, request),
                facts.limits,
                facts.kv_gives,
                facts.kv_takes,
                facts.transports,
                facts.host_id,
                facts.kv_token_bytes,
                load.num_blocks_free * link.limits.block_size if load.num_blocks_total else None,
                facts.max_sequences,
                min(link.slo_tpots_s, default=None),
                link.recent_load.utilization(at),
                link.pace_estimator.pace(at),
                _lacks_adapter(load, request),
                facts.kv_layout,
                self._no_kv_from(link, at),
            )
        )

    def _no_kv_from(self, taker: WorkerLink, at: float) -> frozenset[str]:
        """Return the names of the workers from which `taker` is not to take KV at present."""
        if not self.kv_pair_breakers.any_open:
            return frozenset()
        sources = self.kv_pair_breakers.open_for(taker.worker_id, at)
        links = (self._by_id.get(source) or self._draining.get(source) for source in sources)
        return frozenset(link.address for link in links if link is not None)


def _lacks_adapter(load: pb.Load, request: RoutingRequest | None) -> bool:
    """Return whether a worker that lists its ready adapters does not list the one that the request names."""
    if request is None or not request.adapter:
        return False
    return bool(load.ready_adapters) and request.adapter not in load.ready_adapters


def _waiting(link: WorkerLink, request: RoutingRequest | None) -> int:
    """Return how many prompt tokens the worker reads before those of `request`.

    Tenants take turns, so tokens of another tenant delay the request by no more than its own tenant's tokens do. It is
    not known to which tenants the tokens belong that other gateways sent."""
    num_elsewhere = max(0, link.load.num_waiting_tokens - link.num_prefill_tokens)
    if request is None or (request.tenant == DEFAULT_TENANT and link.prefill_tokens.keys() <= {request.tenant}):
        return link.num_prefill_tokens + num_elsewhere
    own = link.prefill_tokens[request.tenant]
    others = [num for tenant, num in link.prefill_tokens.items() if tenant != request.tenant]
    return own + sum(min(num, own + request.num_tokens) for num in (*others, num_elsewhere))


def _facts_of(link: WorkerLink) -> _HelloFacts:
    hello = link.hello
    return _HelloFacts(
        limits=link.limits,
        kv_gives=frozenset(hello.kv_gives),
        kv_takes=frozenset(hello.kv_takes),
        transports=frozenset(hello.model.transports),
        host_id=hello.host_id,
        kv_token_bytes=hello.kv_token_bytes,
        match_step=hello.checkpoint_tokens or SPAN_TOKENS,
        max_sequences=hello.limits.max_num_seqs or None,
        kv_layout=b"" if hello.checkpoint_tokens else hello.layout.SerializeToString(deterministic=True),
        hello=hello,
    )
