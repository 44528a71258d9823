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
    describe_needs,
)

_STAND_IN = {"prefill": "decode", "decode": "prefill"}  # role -> the role that does its work while none of it serves


class Placement(NamedTuple):
    """The workers that serve a request, and why; without a `prefill` worker the decode worker reads the prompt."""

    decision: Decision
    prefill: WorkerLink | None
    decode: WorkerLink


class Exclusions(NamedTuple):
    """The ids of workers that one request asks last, and of those that it never asks."""

    avoid: Collection[bytes] = frozenset()  # asked only if no other worker serves
    unable: Collection[bytes] = frozenset()  # never asked: they have said that they can never take the request


NONE_EXCLUDED = Exclusions()


class Router:
    """Choose among the serving workers of one model. Belongs to the event loop."""

    def __init__(
        self,
        candidates: Candidates,
        split: str,
        pace_estimator: PaceEstimator,
        max_start_wait_s: float,
        stand_in: bool = False,
    ):
        """`split`: auto, always or never, as in the settings. `pace_estimator` is over all workers of the model.
        `max_start_wait_s`: how long requests wait for a worker that starts. `stand_in`: while no worker of a role
        serves, workers of the other role do its work."""
        self._candidates, self._split, self._pace_estimator = candidates, split, pace_estimator
        self.max_start_wait_s, self._stand_in = max_start_wait_s, stand_in
        self._why_no_pair = 0, ""  # (num_changes of the candidates, the answer)

    def route(self, request: RoutingRequest, matches: Matches, excluded: Exclusions = NONE_EXCLUDED) -> Placement:
        """Choose the workers for a request. Raises NoWorker."""
        reason, tiers = "", self._exclusion_tiers(excluded, include_untrusted=True)
        allow_open_choices = (False, True) if self._candidates.kv_pair_breakers.any_open else (False,)
        for allow_open, split, avoided in itertools.product(
            allow_open_choices, self._split_modes(excluded.unable), tiers
        ):
            try:
                return self._route(request, matches, avoided, split, allow_open)
            except NoRoute as error:
                reason = str(error)
        for avoided in tiers if self._stand_in else ():
            if found := self._route_to_stand_in(request, matches, avoided):
                return found
        raise NoWorker(reason)

    def decode_workers(self) -> Sequence[WorkerLink]:
        """Return the serving workers that may have sequences."""
        decode = self._candidates.serving("decode")
        return [*decode, *self._candidates.serving("prefill")] if self._stand_in else decode

    def can_serve(self) -> bool:
        """Return whether the serving workers have the roles that requests need."""
        if self._stand_in:
            return any(self._candidates.serving(role) for role in ROLES)
        if not self._candidates.serving("decode"):
            return False
        return self.may_prefill_locally or bool(self._candidates.serving("prefill") and not self.why_no_pair())

    @property
    def may_prefill_locally(self) -> bool:
        """Return whether a decode worker may read a prompt itself."""
        return self._split != "always"

    def prefill_s(self, num_tokens: int) -> float:
        """Return the seconds that an idle worker takes to read a prompt, by recent measurements."""
        return self._pace_estimator.pace(now()).prefill_s(num_tokens)

    def has_worker(
        self, role: str, request: RoutingRequest, *, exclude: Set[bytes] = frozenset(), trusted_only: bool = False
    ) -> bool:
        """Return whether a serving worker of this role, or one that stands in, can hold the request.

        `exclude`: ids of workers that do not count. `trusted_only`: untrusted workers do not count either."""
        if trusted_only:
            exclude = exclude | self._candidates.untrusted()
        return any(link.worker_id not in exclude for link in self._able_workers(role, request))

    def _able_workers(self, role: str, request: RoutingRequest) -> Sequence[WorkerLink]:
        """Return the serving workers that do the work of `role` and can hold the request."""
        for each in (role, _STAND_IN[role]) if self._stand_in else (role,):
            if able := [link for link in self._candidates.serving(each) if CAN_HOLD[role](request, link.limits)]:
                return able
        return ()

    def expects_worker(self, request: RoutingRequest) -> bool:
        """Return whether a worker may come to serve soon that a request needs and that is not here now."""
        role = "prefill" if self.has_worker("decode", request) else "decode"
        return self.may_come(role, request)

    def _split_modes(self, unable: Collection[bytes]) -> Sequence[str]:
        """Return the split modes to try: the one of the settings, and "auto" behind "always" if a prefill worker can
        never read the prompt."""
        if not unable or self._split != "always":
            return (self._split,)
        is_unable = any(link.worker_id in unable for link in self._candidates.serving("prefill"))
        return ("always", "auto") if is_unable else ("always",)

    def _exclusion_tiers(self, excluded: Exclusions, *, include_untrusted: bool) -> Sequence[Set[bytes]]:
        """Return the sets of workers to exclude, one after the other: first all that this request avoids and all that
        are untrusted, then only the untrusted ones, and at last, if `include_untrusted`, neither."""
        (avoid, unable), untrusted = excluded, self._candidates.untrusted()
        sets = [{*avoid, *untrusted, *unable}, {*untrusted, *unable}] + ([{*unable}] if include_untrusted else [])
        return [one for i, one in enumerate(sets) if one not in sets[:i]]

    def prefill_for(
        self,
        taker: WorkerLink,
        request: RoutingRequest,
        matches: Matches,
        excluded: Exclusions = NONE_EXCLUDED,
    ) -> WorkerLink | None:
        """Return a prefill worker that can read the prompt and that `taker` can take KV from; None: `taker` reads the
        prompt itself. Raises NoWorker."""
        (candidate,) = self._candidates.as_candidates([taker], matches, request)
        must_split = not self.may_prefill_locally
        takers = [candidate, *([_with_all_pairs(candidate)] if must_split and candidate.no_kv_from else ())]
        for each, avoided in itertools.product(takers, self._exclusion_tiers(excluded, include_untrusted=must_split)):
            near = self._candidates.shortlisted("prefill", request, matches, avoided)
            if best := choose_prefill_for_taker(
                request, self._candidates.as_candidates(near.values(), matches, request), each
            ):
                return near[best.name]
        here = self._candidates.serving("prefill")
        can_never = any(link.worker_id in excluded.unable or not can_prefill(request, link.limits) for link in here)
        if must_split and not can_never and not self._stand_in:
            raise NoWorker("no prefill worker serves")
        return None

    def pooling_worker_for(self, request: RoutingRequest, excluded: Exclusions = NONE_EXCLUDED) -> WorkerLink:
        """Return the prefill worker that reads a prompt for embeddings or scores. Raises NoWorker."""
        for role in ROLES if self._stand_in else ("prefill",):
            for avoided in self._exclusion_tiers(excluded, include_untrusted=True):
                near = self._candidates.shortlisted(role, request, Matches(), avoided, task="prefill")
                if best := choose_prefill_worker(
                    request, self._candidates.as_candidates(near.values(), Matches(), request)
                ):
                    return near[best.name]
        raise NoWorker(f"no prefill worker that serves can read {describe_needs(request)}")

    def may_come(self, role: str, request: RoutingRequest) -> bool:
        """Return whether a worker of this role, or one that stands in, may come to serve soon and can hold the
        request."""
        roles = (role, _STAND_IN[role]) if self._stand_in else (role,)
        return any(self._candidates.may_come(each, request, self.max_start_wait_s, task=role) for each in roles)

    def holder_for(self, taker: WorkerLink, matches: Matches, avoid: Collection[bytes]) -> WorkerLink | None:
        """Return the worker from which `taker` should pull a prefix before it prefills the rest; None: no worker holds
        a prefix that is worth it."""
        holders = self._candidates.holders(matches, avoid)
        (here,) = self._candidates.as_candidates([taker], matches)
        best = choose_holder(here, self._candidates.as_candidates(holders.values(), matches))
        return holders[best.name] if best else None

    def note_fetch_started(self, source: WorkerLink, taker: WorkerLink, chosen_at: float) -> None:
        """Note that `taker` fetches KV from `source`; the two were chosen at `chosen_at` (time.monotonic())."""
        self._candidates.kv_pair_breakers.note_fetch_started(source, taker, chosen_at)

    def note_fetch_failed(self, source: WorkerLink, taker: WorkerLink, why: str) -> bool:
        """Note that no KV of `source` arrived at `taker`: other pairs are used for a while. Return False if this was
        only a try of a pair that had failed before."""
        return self._candidates.kv_pair_breakers.note_fetch_failed(source, taker, why)

    def note_fetch_done(self, source: WorkerLink, taker: WorkerLink) -> None:
        """Note that KV of `source` arrived at `taker`."""
        self._candidates.kv_pair_breakers.note_fetch_done(source, taker)

    def why_no_pair(self) -> str:
        """Return why no serving decode worker can take KV from any prefill worker, with the first worker of each role
        as the example. Empty: one can, even if its breaker is open, or no worker of one role serves.

        It is called after every report of every worker, and computed only when the set of serving workers changes."""
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
        """Choose the workers, none of them in `avoid`. `allow_open`: also pairs whose breakers are open. Raises
        NoRoute."""
        prefill, decode = (self._candidates.shortlisted(role, request, matches, avoid) for role in ROLES)
        is_part = len(prefill) < len(self._candidates.serving("prefill"))
        try:
            decision = self._choose(request, prefill, decode, matches, split, allow_open)
        except NoRoute:
            if not is_part:
                raise
            decision = None
        if is_part and (decision is None or decision.reason == "no_prefill_worker"):
            # Perhaps the shortlist has no prefill worker whose KV these decode workers can take.
            prefill = self._candidates.shortlisted("prefill", request, matches, avoid, everyone=True)
            decision = self._choose(request, prefill, decode, matches, split, allow_open)
        return Placement(decision, prefill.get(decision.prefill or ""), decode[decision.decode])

    def _route_to_stand_in(self, request: RoutingRequest, matches: Matches, avoid: Set[bytes]) -> Placement | None:
        """Return a placement on one worker that does the work of both roles: a decode worker, or, if none serves, a
        prefill worker. None: no worker can hold the request."""
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
    """Return the taker without its open breakers, for requests that cannot be served otherwise."""
    return taker._replace(no_kv_from=frozenset())


def _why_apart(source: Candidate, taker: Candidate) -> str:
    """Return why a worker cannot take KV from another one, by what both have reported."""
    if source.kv_gives.isdisjoint(taker.kv_takes):
        why = "its KV has a form that is not taken (--kv-dtype), or with --strict-numerics another numerics class"
    else:
        ours, theirs = (",".join(sorted(each.transports)) or "none" for each in (source, taker))
        where = "" if source.host_id == taker.host_id else ", to another host"
        why = f"no transport in common that carries it{where}: {ours} and {theirs}"
    return f"{source.name} > {taker.name}: {why}"
