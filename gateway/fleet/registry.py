"""The workers of this gateway: who serves, what model they serve, and who is told when that changes."""

import asyncio
import secrets
from collections.abc import Callable, Collection, Sequence, Set
from functools import partial

from baton import tasks
from baton.service.clock import now
from baton.service.errors import InvalidRequest, Unavailable
from baton.service.security.access import Access
from baton.v1 import worker_pb2 as pb
from gateway.config.networks import Networks
from gateway.config.served_model import PRESETS, ServedModel
from gateway.config.settings import GatewaySettings
from gateway.config.slo_classes import read_classes
from gateway.discovery.dns import WorkerName, is_name
from gateway.discovery.redis_registry import make_roster
from gateway.discovery.registration import Registered
from gateway.discovery.worker_sessions import Members
from gateway.fleet.candidates import CAN_HOLD, ROLES, Candidates
from gateway.fleet.process_clock import follow_process_time
from gateway.link.token_batching import TokenBatching
from gateway.link.worker_link import LinkState, WorkerLink
from gateway.model.model_folder import ModelFolder
from gateway.model.model_identities import LOOK_S
from gateway.prefix.cluster_secret import derived_secret
from gateway.prefix.prefix_index import PrefixIndex
from gateway.prefix.prefix_matches import Matches
from gateway.routing.latency_model import WorkerRates
from gateway.routing.routing import (
    Decision,
    NoRoute,
    RoutingRequest,
    can_decode,
    can_prefill,
    choose,
    choose_holder,
    choose_source,
    compatible,
)
from kvtransfer.naming import ModelIdentity

INSTANCE_BYTES = 16
_RETRY_AFTER_S = 1.0


class Registry:
    """`on_change()` runs after anything that routing or readiness may depend on."""

    def __init__(self, settings: GatewaySettings, folder: ModelFolder, index: PrefixIndex, secret: bytes | None):
        """`secret` None: derived from the model, once a worker has said what it is."""
        self.instance = secrets.token_bytes(INSTANCE_BYTES)
        self.on_change: Callable[[], None] = lambda: None
        self._settings, self._folder, self._index = settings, folder, index
        self._secret = secret
        self._slo_classes = frozenset(read_classes(settings.slo_classes))
        self._identities = settings.model_identities()
        self._joined: dict[WorkerLink, bytes] = {}
        self._names: list[WorkerName] = []
        self._placed: dict[WorkerLink, str] = {}  # the role that it stands in
        self._pairs = 0, False  # (changes of who serves, whether any two fit)
        self._model: tuple[int, ServedModel] | None = None  # (these changes, what is served)
        self._fleet = WorkerRates()  # what workers are like
        self._pace = TokenBatching()
        self.candidates = Candidates(lambda role: self.prefill if role == "prefill" else self.decode)
        self.prefill = self._links("prefill", settings.prefill_workers)
        self.decode = self._links("decode", settings.decode_workers)
        self.registered = Registered(
            {
                "prefill": self._members("prefill", self.prefill, is_named=False),
                "decode": self._members("decode", self.decode, is_named=False),
            },
            make_roster(settings.redis),
            Networks(settings.worker_networks),
        )

    @property
    def links(self) -> list[WorkerLink]:
        return self.prefill + self.decode

    @property
    def identity(self) -> ModelIdentity | None:
        """Of the model that is served: of who came first of those that may (model_identities.py), for as long as one of
        it is here."""
        return next((ModelIdentity(link.hello.model_identity) for link in self._joined if link.hello), None)

    @property
    def secret(self) -> bytes:
        """Raises Unavailable before it is known."""
        if self._secret is not None:
            return self._secret
        return derived_secret(self.known_identity())

    @property
    def card(self) -> pb.ModelCard | None:
        """What a decode worker says of the model."""
        return next((link.hello.model for link in self.decode if link.serving and link.hello), None)

    @property
    def model(self) -> ServedModel:
        """What requests are checked against: the folder, within what workers can hold. Asked by every request: looked
        for again only when others serve."""
        if self._model is None or self._model[0] != self.candidates.num_changes:
            self._model = self.candidates.num_changes, self._served_model()
        return self._model[1]

    def _served_model(self) -> ServedModel:
        folder = self._folder
        said = [link.hello for link in self.candidates.serving("decode")]
        # Of all that have been here: a request is not wrong because the one that could hold it starts again.
        lengths = [link.limits.max_model_len for link in self.decode if link.limits]
        return ServedModel(
            name=folder.name,
            context=min(folder.context, max(lengths, default=folder.context)),
            is_bound_by_workers=max(lengths, default=folder.context) < folder.context,
            vocab_size=folder.vocab_size,
            eos_ids=folder.eos_ids,
            defaults=folder.defaults,
            slo_classes=self._slo_classes,
            proposers=frozenset(name for hello in said for name in hello.model.proposers) if said else None,
            limits=PRESETS[self._settings.limits],
        )

    async def run(self) -> None:
        """Keeps all sessions, until cancelled."""
        try:
            async with asyncio.TaskGroup() as group:
                for link in self.links:
                    tasks.start(f"link {link.address}", link.run, group=group)
                for name in self._names:
                    tasks.start(f"name {name.address}", partial(name.follow, group, self._changed), group=group)
                following = partial(self.registered.follow, group, self._changed)
                tasks.start("registered workers", following, group=group)
                if self._identities.is_file:
                    tasks.start("model identities", self._follow_identities, group=group)
                tasks.start("silence", partial(follow_process_time, self._listen), group=group)
        finally:
            await self.registered.close()

    def _changed(self) -> None:
        self.on_change()

    def _listen(self, lived_s: float) -> None:
        for link in self.links:
            link.check_silence(lived_s)

    def not_ready(self) -> str | None:
        """Why no request could be served now, or None."""
        takers = self.candidates.serving("decode")
        if not takers:
            return "no decode worker serves: " + self._excuses(self.decode)
        if self._settings.split != "always" or self._any_pair(takers):
            return None
        return "no prefill worker serves that a decode worker can take KV from: " + self._excuses(self.prefill)

    def check_fits(self, ask: RoutingRequest) -> None:
        """Raises InvalidRequest for what no decode worker that has been here could hold. Its tokens are checked against
        the context; here it is the blocks of its choices."""
        known = {link.limits for link in self.decode if link.limits}
        if known and not any(can_decode(ask, limits) for limits in known):
            most = max(limits.num_blocks for limits in known)
            told = f"the prompt's end needs a KV block for each choice, and the largest decode worker has {most} blocks"
            raise InvalidRequest("sampling.n", f"{ask.num_choices}: {told}")

    def route(
        self,
        ask: RoutingRequest,
        matches: Matches,
        avoid: Collection[bytes],
        too_short: Collection[bytes] = frozenset(),
    ) -> tuple[Decision, WorkerLink | None, WorkerLink]:
        """(decision, prefill link, decode link); those in `avoid` only if there is nobody else, those in `too_short`,
        who have said so, never. Raises Unavailable."""
        split = "auto" if too_short else self._settings.split  # the prompt may be too long for every prefill worker
        for avoided in self._avoidances(avoid, too_short, True):
            try:
                return self._route(ask, matches, avoided, split)
            except NoRoute as error:
                reason = str(error)
        raise Unavailable(reason, _RETRY_AFTER_S, reason="NO_WORKER")

    @property
    def may_read_where_it_decodes(self) -> bool:
        """Whether a prompt needs no prefill worker."""
        return self._settings.split != "always"

    def prefill_s(self, num_tokens: int) -> float:
        """To read such a prompt on a worker that does nothing else, as workers have been."""
        return self._fleet.pace(now()).prefill_s(num_tokens)

    def others(self, role: str, ask: RoutingRequest, avoid: Set[bytes]) -> bool:
        """Whether anybody of a role serves who can hold the request and is not in `avoid`."""
        can_hold, unwanted = CAN_HOLD[role], avoid | self.candidates.set_aside()
        return any(
            can_hold(ask, link.limits) and link.worker_id not in unwanted for link in self.candidates.serving(role)
        )

    def _avoidances(
        self, avoid: Collection[bytes], too_short: Collection[bytes], is_forced: bool
    ) -> Sequence[Set[bytes]]:
        """Whom not to ask, the best way first: next come those that this request avoids, and where somebody must be
        found, at last those that are set aside."""
        aside = self.candidates.set_aside()
        ways = [{*avoid, *aside, *too_short}, {*aside, *too_short}] + ([{*too_short}] if is_forced else [])
        return [way for i, way in enumerate(ways) if way not in ways[:i]]

    def source_for(
        self, taker: WorkerLink, ask: RoutingRequest, matches: Matches, avoid: Collection[bytes],
        too_short: Collection[bytes] = frozenset(),
    ) -> WorkerLink | None:  # fmt: skip
        """A prefill worker that `taker` can take KV from, and that can read the prompt; None: `taker` reads it itself.
        Raises Unavailable."""
        (candidate,) = self.candidates.seen([taker], matches, ask)
        is_forced = not self.may_read_where_it_decodes
        for avoided in self._avoidances(avoid, too_short, is_forced):
            near = self.candidates.near("prefill", ask, matches, avoided)
            if best := choose_source(ask, self.candidates.seen(near.values(), matches, ask), candidate):
                return near[best.name]
        here = self.candidates.serving("prefill")
        is_too_long = any(link.worker_id in too_short or not can_prefill(ask, link.limits) for link in here)
        if is_forced and not is_too_long:
            raise Unavailable("no prefill worker serves", _RETRY_AFTER_S, reason="NO_WORKER")
        return None

    def holder_for(self, reader: WorkerLink, matches: Matches, avoid: Collection[bytes]) -> WorkerLink | None:
        """Whom `reader` should pull a prefix from before it prefills the rest; None: nobody, or it is not worth it."""
        holders = self.candidates.holders(matches, avoid)
        (here,) = self.candidates.seen([reader], matches)
        best = choose_holder(here, self.candidates.seen(holders.values(), matches))
        return best and holders[best.name]

    def _route(self, ask, matches, avoid, split):
        prefill, decode = (self.candidates.near(role, ask, matches, avoid) for role in ROLES)
        try:
            decision = self._choose(ask, prefill, decode, matches, split)
            fits = decision.reason != "no_prefill_worker"
        except NoRoute:
            fits = False
        if not fits:  # perhaps nobody was drawn who has KV for these, or a way to them
            prefill = self.candidates.near("prefill", ask, matches, avoid, everybody=True)
            decision = self._choose(ask, prefill, decode, matches, split)
        source, taker = prefill.get(decision.prefill), decode[decision.decode]
        (source or taker).recent.add(decision.read_s, now())
        taker.recent.add(decision.write_s, now())
        return decision, source, taker

    def _choose(self, ask, prefill, decode, matches, split) -> Decision:
        seen = (self.candidates.seen(links.values(), matches, ask) for links in (prefill, decode))
        return choose(ask, *seen, split)

    def _any_pair(self, takers: Sequence[WorkerLink]) -> bool:
        """Asked after every report of every worker: looked for again only when others serve."""
        if self._pairs[0] != self.candidates.num_changes:
            sources, taking = (
                self.candidates.seen(links, Matches()) for links in (self.candidates.serving("prefill"), takers)
            )
            found = any(compatible(source, taker) for source in sources for taker in taking)
            self._pairs = self.candidates.num_changes, found
        return self._pairs[1]

    def _links(self, role: str, addresses: Collection[str]) -> list[WorkerLink]:
        """Those of plain addresses; a name brings its own once it is looked up."""
        links = [self._link(role, address) for address in addresses if not is_name(address)]
        names = [address for address in addresses if is_name(address)]
        self._names += [WorkerName(name, self._members(role, links)) for name in names]
        return links

    def _members(self, role: str, links: list[WorkerLink], is_named: bool = True) -> Members:
        return Members(links, partial(self._link, role, is_named=is_named), self._remove)

    def _remove(self, link: WorkerLink) -> None:
        self._model = None  # its length counts no more
        self._placed.pop(link, None)
        for links in (self.prefill, self.decode):
            if link in links:
                links.remove(link)

    # ---- what links call ----

    def _link(self, role: str, address: str, is_named: bool = True) -> WorkerLink:
        """`is_named`: in this gateway's settings; others have registered."""
        return WorkerLink(
            address,
            self.instance,
            check_hello=partial(self._why_not, is_named=is_named),
            on_change=self._on_link_change,
            on_block_events=lambda link, events: self._index.apply(link.worker_id, events),
            max_unread_tokens=self._settings.max_unread_tokens,
            access=Access(self._settings.tls_ca, self._settings.tls_cert, self._settings.tls_key),
            fleet=self._fleet,
            pace=self._pace,
        )

    def _why_not(self, hello: pb.Hello, is_named: bool) -> str | None:
        if not set(hello.roles) & set(ROLES):
            return f"is a {'/'.join(hello.roles)} worker: neither prefill nor decode"
        if hello.tokenizer_digest != self._folder.tokenizer_digest:
            return f"has another tokenizer.json than {self._folder.path}"
        if hello.model.vocab_size != self._folder.vocab_size:
            config = self._folder.path / "config.json"
            return f"has {hello.model.vocab_size} token ids, {config} has {self._folder.vocab_size}"
        return self._identities.why_not(hello.model_identity, self.identity, is_named)

    async def _follow_identities(self) -> None:
        """Those whose model is no longer listed go: what runs there may end elsewhere."""
        while True:
            await asyncio.sleep(LOOK_S)
            if await asyncio.to_thread(self._identities.read_again):
                for link in self.links:
                    if link.hello is not None and not self._identities.lists(link.hello.model_identity):
                        link.hang_up()

    def _place(self, link: WorkerLink) -> None:
        """In the role that it says it has: a worker may come back in the other one."""
        role = link.hello.roles[0]
        if self._placed.get(link) == role:
            return  # asked after every report of every worker
        self._placed[link] = role
        links, others = (self.prefill, self.decode) if role == "prefill" else (self.decode, self.prefill)
        if link in others:
            others.remove(link)
            links.append(link)

    def _on_link_change(self, link: WorkerLink) -> None:
        if link.hello is not None:
            self._place(link)
        self.candidates.update(link)
        if link.state in (LinkState.CONNECTING, LinkState.REFUSED):
            if worker := self._joined.pop(link, None):
                self._index.drop(worker)
        elif link not in self._joined:
            self._joined[link] = link.worker_id
            self._index.join(link.worker_id, link.subscribe)
        self.on_change()

    def known_identity(self) -> ModelIdentity:
        """Raises Unavailable before it is known."""
        if (identity := self.identity) is None:
            raise Unavailable("no worker has said yet which model it serves", _RETRY_AFTER_S, reason="NO_WORKER")
        return identity

    def _excuses(self, links: list[WorkerLink]) -> str:
        found = [f"{link.address} {link.state.value}: {link.reason}" for link in links]
        found += [
            f"{name.address}: {name.reason}" for name in self._names if name.reason and name.members.are_of(links)
        ]
        found += self.registered.excuses("prefill" if links is self.prefill else "decode")
        return "; ".join(found) or "none is configured, and none has registered"
