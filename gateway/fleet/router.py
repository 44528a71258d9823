"""Choose workers for requests, among those that serve now."""

import itertools
from collections.abc import Collection, Mapping, Sequence, Set
from dataclasses import replace
from typing import NamedTuple

from baton.protocol import ROLES
from baton.service.clock import now
from baton.service.errors import NoWorker
from gateway.fleet.candidates import CAN_HOLD, Candidates
from gateway.link.worker_link import WorkerLink
from gateway.prefix.prefix_matches import Matches
from gateway.routing.latency_model import PaceEstimator
from gateway.routing.routing import (
    Candidate,
    Decision,
    NoRoute,
    RoutingRequest,
    can_prefill,
    choose,
    choose_holder,
    choose_prefill_for_taker,
    choose_prefill_worker,
    compatible,
    needs,
)

_STAND_IN = {"prefill": "decode", "decode": "prefill"}  # role -> who does its work while none of it serves


class Placement(NamedTuple):
    """The workers that a request goes to, and why; without a `prefill` the decode worker reads the prompt."""

    decision: Decision
    prefill: WorkerLink | None
    decode: WorkerLink


class Exclusions(NamedTuple):
    """Workers that one request goes to last, and those that it never goes to, by their ids."""

    avoid: Collection[bytes] = frozenset()  # asked only if no other serves
    unable: Collection[bytes] = frozenset()  # have said that they can never take it


NONE_EXCLUDED = Exclusions()


class Router:
    """Belongs to the event loop. Workers to avoid are named by their ids."""

    def __init__(
        self,
        candidates: Candidates,
        split: str,
        pace_estimator: PaceEstimator,
        max_start_wait_s: float,
        stand_in: bool = False,
    ):
        """`split`: auto, always or never, as in the settings; `pace_estimator`: of all workers; `max_start_wait_s`: for
        one that starts; `stand_in`: while no worker of a role serves, those of the other do its work."""
        self._candidates, self._split, self._pace_estimator = candidates, split, pace_estimator
        self.max_start_wait_s, self._stand_in = max_start_wait_s, stand_in
        self._why_no_pair = 0, ""  # (num_changes of the candidates, the answer)

    def route(self, request: RoutingRequest, matches: Matches, excluded: Exclusions = NONE_EXCLUDED) -> Placement:
        """Choose the workers. Raises NoWorker."""
        reason, avoidances = "", self._avoidances(excluded, True)
        allow_open_choices = (False, True) if self._candidates.kv_pair_breakers.any_open else (False,)
        for allow_open, split, avoided in itertools.product(
            allow_open_choices, self._splits(excluded.unable), avoidances
        ):
            try:
                return self._route(request, matches, avoided, split, allow_open)
            except NoRoute as error:
                reason = str(error)
        for avoided in avoidances if self._stand_in else ():
            if found := self._route_to_stand_in(request, matches, avoided):
                return found
        raise NoWorker(reason)

    def decode_workers(self) -> Sequence[WorkerLink]:
        """Return the serving workers that may have sequences."""
        decode = self._candidates.serving("decode")
        return [*decode, *self._candidates.serving("prefill")] if self._stand_in else decode

    def can_serve(self) -> bool:
        """Return whether the roles that serve suffice for requests."""
        if self._stand_in:
            return any(self._candidates.serving(role) for role in ROLES)
        if not self._candidates.serving("decode"):
            return False
        return self.may_prefill_locally or bool(self._candidates.serving("prefill") and not self.why_no_pair())

    @property
    def may_prefill_locally(self) -> bool:
        """Return whether a prompt needs no prefill worker."""
        return self._split != "always"

    def prefill_s(self, num_tokens: int) -> float:
        """Return the seconds that an idle worker takes to read a prompt, as measured lately."""
        return self._pace_estimator.pace(now()).prefill_s(num_tokens)

    def has_other(self, role: str, request: RoutingRequest, avoid: Set[bytes]) -> bool:
        """As `has_any`, but of workers that are not set aside."""
        return self.has_any(role, request, avoid | self._candidates.set_aside())

    def has_any(self, role: str, request: RoutingRequest, avoid: Set[bytes] = frozenset()) -> bool:
        """Return whether a worker of this role, or one that stands in, serves that can hold the request and is not in
        `avoid`."""
        return any(link.worker_id not in avoid for link in self._doing(role, request))

    def _doing(self, role: str, request: RoutingRequest) -> Sequence[WorkerLink]:
        """Return the serving workers that do the work of this role and can hold the request."""
        for each in (role, _STAND_IN[role]) if self._stand_in else (role,):
            if able := [link for link in self._candidates.serving(each) if CAN_HOLD[role](request, link.limits)]:
                return able
        return ()

    def expects_worker(self, request: RoutingRequest) -> bool:
        """Return whether a worker may come soon that serves a request which none can serve now."""
        role = "prefill" if self.has_any("decode", request) else "decode"
        return self.may_come(role, request)

    def _splits(self, unable: Collection[bytes]) -> Sequence[str]:
        """Return when to split: as the settings say, then, where a prefill worker can never read the prompt, not."""
        if not unable or self._split != "always":
            return (self._split,)
        is_unable = any(link.worker_id in unable for link in self._candidates.serving("prefill"))
        return ("always", "auto") if is_unable else ("always",)

    def _avoidances(self, excluded: Exclusions, is_forced: bool) -> Sequence[Set[bytes]]:
        """Return sets of workers not to ask, the largest first: the second admits those that this request avoids, and
        where one must be found, the last also those that are set aside."""
        (avoid, unable), aside = excluded, self._candidates.set_aside()
        sets = [{*avoid, *aside, *unable}, {*aside, *unable}] + ([{*unable}] if is_forced else [])
        return [one for i, one in enumerate(sets) if one not in sets[:i]]

    def prefill_for(
        self,
        taker: WorkerLink,
        request: RoutingRequest,
        matches: Matches,
        excluded: Exclusions = NONE_EXCLUDED,
    ) -> WorkerLink | None:
        """Return a prefill worker that can read the prompt and that `taker` can take KV from; None: `taker` reads it
        itself. Raises NoWorker."""
        (candidate,) = self._candidates.as_candidates([taker], matches, request)
        is_forced = not self.may_prefill_locally
        takers = [candidate, *([_with_all_pairs(candidate)] if is_forced and candidate.no_kv_from else ())]
        for each, avoided in itertools.product(takers, self._avoidances(excluded, is_forced)):
            near = self._candidates.shortlisted("prefill", request, matches, avoided)
            if best := choose_prefill_for_taker(
                request, self._candidates.as_candidates(near.values(), matches, request), each
            ):
                return near[best.name]
        here = self._candidates.serving("prefill")
        can_never = any(link.worker_id in excluded.unable or not can_prefill(request, link.limits) for link in here)
        if is_forced and not can_never and not self._stand_in:
            raise NoWorker("no prefill worker serves")
        return None

    def pooling_worker_for(self, request: RoutingRequest, excluded: Exclusions = NONE_EXCLUDED) -> WorkerLink:
        """Return the prefill worker that reads a prompt which nobody takes over. Raises NoWorker."""
        for role in ROLES if self._stand_in else ("prefill",):
            for avoided in self._avoidances(excluded, True):
                near = self._candidates.shortlisted(role, request, Matches(), avoided, task="prefill")
                if best := choose_prefill_worker(
                    request, self._candidates.as_candidates(near.values(), Matches(), request)
                ):
                    return near[best.name]
        raise NoWorker(f"no prefill worker that serves can read {needs(request)}")

    def may_come(self, role: str, request: RoutingRequest) -> bool:
        """Return whether a worker of this role, or one that stands in, may come soon that can hold the request."""
        roles = (role, _STAND_IN[role]) if self._stand_in else (role,)
        return any(self._candidates.may_come(each, request, self.max_start_wait_s, task=role) for each in roles)

    def holder_for(self, taker: WorkerLink, matches: Matches, avoid: Collection[bytes]) -> WorkerLink | None:
        """Return the worker from which `taker` should pull a prefix before it prefills the rest; None: none is worth
        it."""
        holders = self._candidates.holders(matches, avoid)
        (here,) = self._candidates.as_candidates([taker], matches)
        best = choose_holder(here, self._candidates.as_candidates(holders.values(), matches))
        return holders[best.name] if best else None

    def note_fetch_started(self, source: WorkerLink, taker: WorkerLink, chosen_at: float) -> None:
        """KV of `source` is fetched by `taker`; they were chosen at `chosen_at` (time.monotonic())."""
        self._candidates.kv_pair_breakers.note_fetch_started(source, taker, chosen_at)

    def note_fetch_failed(self, source: WorkerLink, taker: WorkerLink, why: str) -> bool:
        """No KV of `source` came to `taker`: others are paired for a while. Return False where it was known that none
        might."""
        return self._candidates.kv_pair_breakers.note_fetch_failed(source, taker, why)

    def note_fetch_done(self, source: WorkerLink, taker: WorkerLink) -> None:
        """KV of `source` came to `taker`."""
        self._candidates.kv_pair_breakers.note_fetch_done(source, taker)

    def why_no_pair(self) -> str:
        """Return why no decode worker that serves can take KV from any prefill worker, by the first of both; empty:
        some can, be its breaker open, or of one role none serves.

        It is asked after every report of every worker, and computed only when other workers serve."""
        if self._why_no_pair[0] != self._candidates.num_changes:
            sources, takers = (
                self._candidates.as_candidates(self._candidates.serving(role), Matches()) for role in ROLES
            )
            takers = [_with_all_pairs(taker) for taker in takers]
            is_one = any(compatible(source, taker) for source in sources for taker in takers)
            why = "" if is_one or not sources or not takers else _why_apart(sources[0], takers[0])
            self._why_no_pair = self._candidates.num_changes, why
        return self._why_no_pair[1]

    def _route(
        self, request: RoutingRequest, matches: Matches, avoid: Set[bytes], split: str, allow_open: bool
    ) -> Placement:
        """`allow_open`: also pairs whose breakers are open. Raises NoRoute."""
        prefill, decode = (self._candidates.shortlisted(role, request, matches, avoid) for role in ROLES)
        is_part = len(prefill) < len(self._candidates.serving("prefill"))
        try:
            decision = self._choose(request, prefill, decode, matches, split, allow_open)
        except NoRoute:
            if not is_part:
                raise
            decision = None
        if is_part and (decision is None or decision.reason == "no_prefill_worker"):
            # Perhaps no worker was drawn that has KV for these, or a transport to them.
            prefill = self._candidates.shortlisted("prefill", request, matches, avoid, everyone=True)
            decision = self._choose(request, prefill, decode, matches, split, allow_open)
        return Placement(decision, prefill.get(decision.prefill or ""), decode[decision.decode])

    def _route_to_stand_in(self, request: RoutingRequest, matches: Matches, avoid: Set[bytes]) -> Placement | None:
        """Return a worker that does the work of both roles: a decode worker, or where none serves a prefill worker."""
        for role in ("decode", _STAND_IN["decode"]):
            near = self._candidates.shortlisted(role, request, matches, avoid, task="decode")
            try:
                decision = choose(request, (), self._candidates.as_candidates(near.values(), matches, request), "never")
            except NoRoute:
                continue
            return Placement(replace(decision, reason="stand_in"), None, near[decision.decode])
        return None

    def _choose(
        self,
        request: RoutingRequest,
        prefill: Mapping[str, WorkerLink],
        decode: Mapping[str, WorkerLink],
        matches: Matches,
        split: str,
        allow_open: bool,
    ) -> Decision:
        sources, takers = (
            self._candidates.as_candidates(links.values(), matches, request) for links in (prefill, decode)
        )
        return choose(request, sources, [*map(_with_all_pairs, takers)] if allow_open else takers, split)


def _with_all_pairs(taker: Candidate) -> Candidate:
    """Return it with those as sources, too, to which its breakers are open: for where there is no other way."""
    return taker._replace(no_kv_from=frozenset())


def _why_apart(source: Candidate, taker: Candidate) -> str:
    """Return why two workers that have KV are no pair, by what both have said."""
    if source.kv_gives.isdisjoint(taker.kv_takes):
        why = "its KV has a form that is not taken (--kv-dtype), or with --strict-numerics another numerics class"
    else:
        ours, theirs = (",".join(sorted(each.transports)) or "none" for each in (source, taker))
        where = "" if source.host_id == taker.host_id else ", to another host"
        why = f"no transport in common that carries it{where}: {ours} and {theirs}"
    return f"{source.name} > {taker.name}: {why}"
