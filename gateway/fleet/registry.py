"""The workers of this gateway: sessions with them, their roles, and the model that they serve."""

import asyncio
import secrets
from collections import Counter
from collections.abc import Callable, Collection, Sequence
from functools import partial

from baton import tasks
from baton.protocol import ADAPTER_BYTES, CONSTRAINTS, INSTANCE_BYTES, PROMPT_LOGPROBS, ROLES, check_model_name
from baton.service.clock import now
from baton.service.errors import InvalidRequest, Unavailable
from baton.service.observe.core_wait import EventLoopWatch
from baton.service.security.access import Access
from baton.v1 import worker_pb2 as pb
from gateway.config.adapter_tenants import read_adapter_tenants
from gateway.config.networks import Networks
from gateway.config.served_model import PRESETS, ServedModel
from gateway.config.settings import GatewaySettings
from gateway.config.slo_classes import read_classes
from gateway.discovery.dns import DnsWorkers, is_name
from gateway.discovery.registration import Registrations
from gateway.discovery.session_set import SessionSet
from gateway.discovery.worker_directory import make_directory
from gateway.fleet.candidates import Candidates
from gateway.fleet.process_clock import follow_process_time
from gateway.fleet.router import Router
from gateway.link.token_batching import TokenBatching
from gateway.link.worker_link import LinkState, WorkerLink
from gateway.model.model_folder import ModelFolder
from gateway.model.model_identities import LOOK_S
from gateway.prefix.cluster_secret import derived_secret
from gateway.prefix.prefix_index import PrefixIndex
from gateway.routing.latency_model import WorkerRates
from gateway.routing.routing import RoutingRequest, can_decode
from kvtransfer.naming import ModelIdentity

_RETRY_AFTER_S = 1.0
_POLL_S = 0.05
_FEATURE_FIELDS = {CONSTRAINTS: "constraint", PROMPT_LOGPROBS: "sampling.prompt_logprobs"}  # that need a feature


class Registry:
    """Belongs to the event loop; `run()` keeps all sessions. `router` chooses among the workers that serve."""

    def __init__(
        self,
        settings: GatewaySettings,
        folder: ModelFolder,
        index: PrefixIndex,
        secret: bytes | None,
        on_change: Callable[[], None] = lambda: None,
    ):
        """`secret` None: derived from the model, once a worker has said what it is. `on_change()` runs after anything
        that routing or readiness may depend on."""
        self.instance = secrets.token_bytes(INSTANCE_BYTES)
        self._on_change = on_change
        self._settings, self._folder, self._index = settings, folder, index
        self._secret = secret
        self._slo_classes = frozenset(read_classes(settings.slo_classes))
        self._adapter_tenants = read_adapter_tenants(settings.adapter_tenants)
        self._identities = settings.model_identities()
        self._joined: dict[WorkerLink, bytes] = {}
        self._placed: dict[WorkerLink, str] = {}  # by the role that it said last
        self._model: tuple[int, ServedModel] | None = None  # (num_changes of the candidates, what is served)
        self._rates = WorkerRates()  # of all workers
        self._batching = TokenBatching()
        self.loop_watch = EventLoopWatch()
        self._links: dict[str, list[WorkerLink]] = {role: [] for role in ROLES}
        self._names: list[DnsWorkers] = []
        self._add_configured("prefill", settings.prefill_workers)
        self._add_configured("decode", settings.decode_workers)
        self.candidates = Candidates(self._links)
        self.router = Router(self.candidates, settings.split, self._rates, settings.max_start_wait_s, settings.stand_in)
        sets = {role: self._session_set(role, is_named=False) for role in ROLES}
        self.registered = Registrations(sets, make_directory(settings.redis), Networks(settings.worker_networks))

    @property
    def prefill(self) -> list[WorkerLink]:
        """Prefill workers, whatever their state."""
        return self._links["prefill"]

    @property
    def decode(self) -> list[WorkerLink]:
        """Decode workers, whatever their state."""
        return self._links["decode"]

    @property
    def links(self) -> list[WorkerLink]:
        """All workers, whatever their state."""
        return self.prefill + self.decode

    def worker_started_at(self) -> float:
        """Return when the youngest worker said its first Hello (time.monotonic()); 0 before the first."""
        return max((link.started_at for link in self.links), default=0.0)

    @property
    def identity(self) -> ModelIdentity | None:
        """The identity of the model that is served: of the first worker that joined and is still here."""
        return next((ModelIdentity(link.hello.model_identity) for link in self._joined if link.hello), None)

    @property
    def secret(self) -> bytes:
        """The cluster secret. Raises Unavailable before it is known."""
        if self._secret is not None:
            return self._secret
        return derived_secret(self.known_identity())

    @property
    def card(self) -> pb.ModelCard | None:
        """The model card of a serving worker, a decode worker if there is one, or None."""
        return next((link.hello.model for link in self.decode + self.prefill if link.serving and link.hello), None)

    @property
    def model(self) -> ServedModel:
        """The model that requests are checked against. Every request asks, so it is made again only when other workers
        serve."""
        if self._model is None or self._model[0] != self.candidates.num_changes:
            self._model = self.candidates.num_changes, self._served_model()
        return self._model[1]

    def _served_model(self) -> ServedModel:
        folder = self._folder
        hellos = [link.hello for link in self.candidates.serving("decode")]
        # Of all that have been here: a request is not wrong because the worker that could hold it restarts.
        lengths = [link.limits.max_model_len for link in self.decode if link.limits]
        return ServedModel(
            name=folder.name,
            context=min(folder.context, max(lengths, default=folder.context)),
            is_bound_by_workers=max(lengths, default=folder.context) < folder.context,
            vocab_size=folder.vocab_size,
            eos_ids=folder.eos_ids,
            defaults=folder.defaults,
            slo_classes=self._slo_classes,
            proposers=frozenset(name for hello in hellos for name in hello.model.proposers) if hellos else None,
            limits=PRESETS[self._settings.limits],
            adapters=_adapters_of(hellos),
            adapter_tenants=self._adapter_tenants,
        )

    async def run(self) -> None:
        """Keep all sessions, until cancelled."""
        try:
            async with asyncio.TaskGroup() as group:
                for link in self.links:
                    tasks.start(f"link {link.address}", link.run, group=group)
                for name in self._names:
                    tasks.start(f"name {name.address}", partial(name.follow, group, self._on_change), group=group)
                following = partial(self.registered.follow, group, self._on_change)
                tasks.start("registered workers", following, group=group)
                if self._identities.is_file:
                    tasks.start("model identities", self._follow_identities, group=group)
                tasks.start("event loop watch", self.loop_watch.run, group=group)
                tasks.start("silence", partial(follow_process_time, self._listen), group=group)
        finally:
            await self.registered.close()

    def _listen(self, running_s: float) -> None:
        for link in self.links:
            link.check_silence(running_s)

    def not_ready(self) -> str | None:
        """Return why no request could be served now, or None."""
        if self.router.can_serve():
            return None
        if not self.candidates.serving("decode"):
            return "no decode worker serves: " + self._excuses("decode")
        return "no prefill worker serves that a decode worker can take KV from: " + self._excuses("prefill")

    def check_fits(self, request: RoutingRequest) -> None:
        """Raises InvalidRequest for a request that needs what no known decode worker has: a feature, or more blocks."""
        known = {link.limits for link in self.decode if link.limits}
        for feature in sorted(request.features) if known else ():
            if not any(feature in limits.features for limits in known):
                raise InvalidRequest(_FEATURE_FIELDS.get(feature, "model"), "no decode worker that serves can do this")
        if known and not any(can_decode(request, limits) for limits in known):
            most = max(limits.num_blocks for limits in known)
            why = f"the prompt's end needs a KV block for each choice, and the largest decode worker has {most} blocks"
            raise InvalidRequest("sampling.n", f"{request.num_choices}: {why}")

    def _add_configured(self, role: str, addresses: Collection[str]) -> None:
        """Links to plain addresses; a name brings its own once it is looked up."""
        self._links[role] += [self._link(address) for address in addresses if not is_name(address)]
        names = [address for address in addresses if is_name(address)]
        self._names += [DnsWorkers(name, role, self._session_set(role)) for name in names]

    def _session_set(self, role: str, is_named: bool = True) -> SessionSet:
        """`is_named`: the addresses come from this gateway's settings; others have registered."""
        return SessionSet(self._links[role], partial(self._link, is_named=is_named), self._remove)

    def _remove(self, link: WorkerLink) -> None:
        self._model = None  # its length no longer counts
        self._placed.pop(link, None)
        for links in self._links.values():
            if link in links:
                links.remove(link)

    # ---- what links call ----

    def _link(self, address: str, is_named: bool = True) -> WorkerLink:
        return WorkerLink(
            address,
            self.instance,
            check_hello=partial(self._refusal_of, is_named=is_named),
            on_change=self._on_link_change,
            on_block_events=self._on_block_events,
            max_unread_tokens=self._settings.max_unread_tokens,
            access=Access(self._settings.tls_ca, self._settings.tls_cert, self._settings.tls_key),
            fleet_rates=self._rates,
            batching=self._batching,
        )

    def _refusal_of(self, hello: pb.Hello, is_named: bool) -> str | None:
        """Return why this worker cannot be used, or None."""
        if not set(hello.roles) & set(ROLES):
            return f"is a {'/'.join(hello.roles)} worker: neither prefill nor decode"
        if hello.tokenizer_digest != self._folder.tokenizer_digest:
            return f"has another tokenizer.json than {self._folder.path}"
        if hello.model.vocab_size != self._folder.vocab_size:
            config = self._folder.path / "config.json"
            return f"has {hello.model.vocab_size} token ids, {config} has {self._folder.vocab_size}"
        if wrong := next(filter(None, map(_wrong_adapter, hello.adapters)), None):
            return wrong
        return self._identities.why_not(hello.model_identity, self.identity, is_named)

    async def _follow_identities(self) -> None:
        """End the sessions with workers whose model is no longer listed; requests continue elsewhere."""
        while True:
            await asyncio.sleep(LOOK_S)
            if await asyncio.to_thread(self._identities.read_again):
                for link in self.links:
                    if link.hello is not None and not self._identities.lists(link.hello.model_identity):
                        link.hang_up()

    def _place(self, link: WorkerLink) -> None:
        """Move a worker to the list of the role that it names: it may come back in the other one."""
        role = link.hello.roles[0]
        if self._placed.get(link) == role:
            return  # this runs after every report of every worker
        self._placed[link] = role
        links, others = (self.prefill, self.decode) if role == "prefill" else (self.decode, self.prefill)
        if link in others:
            others.remove(link)
            links.append(link)

    def _on_block_events(self, link: WorkerLink, events: pb.BlockEvents) -> None:
        self._index.apply(link.worker_id, events)

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
        self._on_change()

    def known_identity(self) -> ModelIdentity:
        """Return the identity of the model that is served. Raises Unavailable before it is known."""
        if (identity := self.identity) is None:
            raise Unavailable("no worker has reported yet which model it serves", _RETRY_AFTER_S, reason="NO_WORKER")
        return identity

    async def await_identity(self, deadline: float) -> None:
        """Wait until a worker has reported which model is served, as long as one may come. Raises Unavailable."""
        most_s = self._settings.max_start_wait_s
        until = min(deadline, now() + most_s)
        while self.identity is None and now() < until and any(link.may_come(most_s) for link in self.links):
            await asyncio.sleep(_POLL_S)
        self.known_identity()

    def _excuses(self, role: str) -> str:
        """Return why no worker of this role serves."""
        found = [f"{link.address} {link.state.value}: {link.reason}" for link in self._links[role]]
        found += [f"{name.address}: {name.reason}" for name in self._names if name.reason and name.role == role]
        found += self.registered.excuses(role)
        return "; ".join(found) or "none is configured, and none has registered"


def _adapters_of(hellos: Sequence[pb.Hello]) -> dict[str, bytes]:
    """Return the identity that each name of an adapter stands for: where workers differ, as between two reloads, the one
    that most of them hold."""
    held: dict[str, Counter[bytes]] = {}
    for hello in hellos:
        for adapter in hello.adapters:
            held.setdefault(adapter.name, Counter())[adapter.identity] += 1
    return {name: max(counts, key=lambda identity: (counts[identity], identity)) for name, counts in held.items()}


def _wrong_adapter(adapter: pb.Adapter) -> str | None:
    try:
        check_model_name(adapter.name, "has an adapter named")
    except ValueError as error:
        return str(error)
    size = len(adapter.identity)
    return None if size == ADAPTER_BYTES else f"has an adapter {adapter.name} with an identity of {size} bytes"
