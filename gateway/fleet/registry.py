"""The workers of this gateway: the sessions with them, their roles, and which of the served models each one has."""

import asyncio
import logging
import secrets
from collections.abc import Callable, Collection
from functools import partial

from baton import tasks
from baton.protocol import INSTANCE_BYTES, ROLES
from baton.service.logs import fields
from baton.service.observe.core_wait import EventLoopWatch
from baton.service.security.access import Access
from baton.v1 import worker_pb2 as pb
from gateway.config.adapter_tenants import AdapterTenants
from gateway.config.networks import Networks
from gateway.config.settings import GatewaySettings
from gateway.config.slo_classes import read_classes
from gateway.discovery.dns import DnsWorkers, is_name
from gateway.discovery.registration import Registrations
from gateway.discovery.session_set import SessionSet
from gateway.discovery.worker_directory import LocalDirectory, WorkerDirectory
from gateway.fleet.model_fleet import ModelFleet
from gateway.fleet.process_clock import follow_process_time
from gateway.link.token_batching import TokenBatching
from gateway.link.worker_link import WorkerLink, worker_id_of
from gateway.model.model_folder import ModelFolder
from gateway.model.model_identities import LOOK_S
from gateway.prefix.prefix_index import PrefixIndex
from gateway.routing.latency_model import PaceEstimator

log = logging.getLogger(__name__)


class Registry:
    """All workers of this gateway; `run()` keeps the sessions with them. Belongs to the event loop.

    `fleets` are the workers of each model, the oldest first. While a model is replaced, two fleets have its name."""

    def __init__(
        self,
        settings: GatewaySettings,
        index: PrefixIndex,
        secret: bytes | None,
        on_change: Callable[[], None] = lambda: None,
    ):
        """`secret` None: each model has its own, derived from its identity. `on_change()` is called after each change
        that routing or readiness may depend on. Raises SettingsError."""
        self.instance = secrets.token_bytes(INSTANCE_BYTES)
        self.fleets: list[ModelFleet] = []
        self._on_change = on_change
        self._settings, self._index, self._secret = settings, index, secret
        self.slo_classes = read_classes(settings.slo_classes)
        self._adapter_tenants = AdapterTenants(settings.adapter_tenants)
        self._identities = settings.model_identities()
        self._replaced: dict[bytes, str] = {}  # identity of a model that is no longer served -> the name it had
        self._fleet_of: dict[WorkerLink, ModelFleet] = {}  # by the worker's last Hello that was not refused
        self._joined: dict[WorkerLink, bytes] = {}
        self._role_of: dict[WorkerLink, str] = {}  # the role in the worker's last Hello
        self._batching = TokenBatching()
        self.loop_watch = EventLoopWatch()
        self._links: dict[str, list[WorkerLink]] = {role: [] for role in ROLES}
        self._names: list[DnsWorkers] = []
        self._add_configured("prefill", settings.prefill_workers)
        self._add_configured("decode", settings.decode_workers)
        sets = {role: self._session_set(role, is_configured=False) for role in ROLES}
        directory, networks = _make_directory(settings.redis), Networks(settings.worker_networks)
        self.registered = Registrations(sets, directory, networks, self._stacks, self._stack_of)

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

    def fleet_of(self, link: WorkerLink) -> ModelFleet | None:
        """Return the fleet of a worker, by its last Hello; None: it has not said yet what it serves."""
        return self._fleet_of.get(link)

    # ---- models ----

    def add(self, folder: ModelFolder, required_identity: bytes = b"") -> ModelFleet:
        """Serve a model from now on, even if another one has its name; call `keep` once it is there for good.

        `required_identity`: the identity that its workers must have; empty: any that the settings allow."""
        fleet: ModelFleet

        def links(role: str) -> list[WorkerLink]:
            return [link for link in self._links[role] if self._fleet_of.get(link, fleet) is fleet]

        fleet = ModelFleet(
            folder,
            self._settings,
            links,
            self._identities,
            frozenset(self.slo_classes),
            self._adapter_tenants,
            self._secret,
            required_identity,
        )
        self.fleets.append(fleet)
        return fleet

    def keep(self, fleet: ModelFleet) -> None:
        """Keep a model that was added.

        Workers of models that were replaced or removed before are accepted again if the new model requires their
        identity, or if it has their name and replaces no model that is still served."""
        self._replaced.pop(fleet.required_identity, None)
        others = [each for each in self.fleets if each.name == fleet.name and each is not fleet]
        if all(each.is_retired for each in others):
            for each in others:
                each.excludes_its_workers = False
            self._replaced = {each: name for each, name in self._replaced.items() if name != fleet.name}

    def drop(self, fleet: ModelFleet) -> None:
        """Stop to serve a model; its workers are refused from now on if it excludes them."""
        self.fleets.remove(fleet)
        if fleet.last_identity and fleet.excludes_its_workers:
            self._replaced[fleet.last_identity] = fleet.name
        for link in [link for link, each in self._fleet_of.items() if each is fleet]:
            link.session.hang_up(f"its model is no longer {fleet.name} here")

    async def run(self) -> None:
        """Keep the sessions with all workers, until cancelled."""
        try:
            async with asyncio.TaskGroup() as group:
                for link in self.links:
                    tasks.start(f"link {link.address}", link.session.run, group=group)
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

    def _listen(self, elapsed_s: float) -> None:
        for link in self.links:
            link.session.check_silence(elapsed_s)

    def not_ready(self) -> str | None:
        """Return why no request could be served now, or None if some model can serve."""
        reasons = {fleet: self.not_ready_of(fleet) for fleet in self.fleets if not fleet.is_retired}
        if not all(reasons.values()):
            return None
        if len(reasons) == 1:
            return next(iter(reasons.values()))
        return "; ".join(f"{fleet.name}: {reason}" for fleet, reason in reasons.items())

    def not_ready_of(self, fleet: ModelFleet) -> str | None:
        """Return why no request for this model could be served now, and the reasons of its workers, or None."""
        if (reason := fleet.not_ready()) is None:
            return None
        role = "prefill" if fleet.candidates.serving("decode") else "decode"
        return f"{reason}: {self._excuses(fleet, role)}"

    def _stacks(self) -> set[str]:
        return {fleet.stack for fleet in self.fleets}

    def _stack_of(self, link: WorkerLink) -> str:
        fleet = self.fleet_of(link)
        return fleet.stack if fleet else ""

    def _add_configured(self, role: str, addresses: Collection[str]) -> None:
        """Add a link for each IP address, and a DnsWorkers, which adds links later, for each DNS name."""
        self._links[role] += [self._link(address) for address in addresses if not is_name(address)]
        names = [address for address in addresses if is_name(address)]
        self._names += [DnsWorkers(name, role, self._session_set(role)) for name in names]

    def _session_set(self, role: str, is_configured: bool = True) -> SessionSet:
        """Return a SessionSet that links workers of `role`. `is_configured`: their addresses are from the settings."""
        make_link = partial(self._link, is_configured=is_configured)
        wait_s = self._settings.max_start_wait_s
        return SessionSet(self._links[role], lambda: self.links, make_link, self._remove, wait_s)

    def _remove(self, link: WorkerLink) -> None:
        self._forget()  # the worker's maximum length no longer counts
        role, fleet = self._role_of.pop(link, None), self._fleet_of.pop(link, None)
        if role and fleet:
            fleet.last_gone[role] = f"{link.address} gone: {link.reason}"
            log.info("worker forgotten %s", fields(worker=link.name, address=link.address, reason=link.reason))
        for links in self._links.values():
            if link in links:
                links.remove(link)

    def _forget(self) -> None:
        for fleet in self.fleets:
            fleet.forget()

    # ---- what links call ----

    def _link(self, address: str, is_configured: bool = True) -> WorkerLink:
        self._forget()  # the worker may hold longer requests than those that are known
        return WorkerLink(
            address,
            # Each link has its own instance: two links to one worker must not end each other's sessions.
            secrets.token_bytes(INSTANCE_BYTES),
            on_hello=partial(self._accept_hello, is_configured=is_configured),
            on_change=self._on_link_change,
            on_block_events=self._on_block_events,
            max_unread_tokens=self._settings.max_unread_tokens,
            access=Access(self._settings.tls_ca, self._settings.tls_cert, self._settings.tls_key),
            batching=self._batching,
        )

    def _accept_hello(self, link: WorkerLink, hello: pb.Hello, is_configured: bool) -> str | None:
        """Attach the worker to the fleet of its model, and return None; or return why it cannot be used."""
        if not set(hello.roles) & set(ROLES):
            return f"is a {'/'.join(hello.roles)} worker: neither prefill nor decode"
        worker_id = worker_id_of(hello)
        if other := next((each for each in self.links if each is not link and each.worker_id == worker_id), None):
            return f"is the worker at {other.address}, with which there is a session"
        found = self._find_fleet(hello, is_configured)
        if isinstance(found, str):
            return found
        if is_configured:
            found.trust_identity(hello.model_identity)
        self._attach_to_fleet(link, found)
        return None

    def _attach_to_fleet(self, link: WorkerLink, fleet: ModelFleet) -> None:
        if self._fleet_of.get(link) is not fleet:
            self._fleet_of[link], link.pace_estimator = fleet, PaceEstimator(fleet.pace_estimator)

    def _find_fleet(self, hello: pb.Hello, is_configured: bool) -> ModelFleet | str:
        """Return the fleet of the model that a worker serves, or the reason why there is none.

        Models with the same tokenizer are distinguished by the name in Hello, and two models of one name by their
        identity; an identity that is not known yet goes to the newest of them."""
        misfits = {fleet: fleet.misfit(hello) for fleet in self.fleets}
        fits = [fleet for fleet, why in misfits.items() if why is None]
        if not fits:
            return "; ".join(dict.fromkeys(why for why in misfits.values() if why))
        if len(names := sorted({fleet.name for fleet in fits})) > 1:
            fits = [fleet for fleet in fits if fleet.name == hello.model.name]
            if not fits:
                return f"serves {hello.model.name!r}; with this tokenizer its --served-model-name must be one of {', '.join(names)}"
        identity = hello.model_identity
        if known := next((fleet for fleet in fits if fleet.has(identity)), None):
            return known.check_identity(identity, is_configured) or known
        if name := self._replaced.get(identity):
            return f"serves the model {identity.hex()}, which is no longer {name} here"
        reasons = []
        for fleet in reversed([fleet for fleet in fits if not fleet.is_retired]):
            if (why := fleet.check_identity(identity, is_configured)) is None:
                return fleet
            reasons.append(why)
        return reasons[0] if reasons else f"serves a model that is no longer {fits[0].name} here"

    async def _follow_identities(self) -> None:
        """End the sessions with workers whose model is no longer listed; their requests continue on other workers."""
        while True:
            await asyncio.sleep(LOOK_S)
            if await asyncio.to_thread(self._identities.read_again):
                for link, fleet in self._fleet_of.items():
                    if (
                        link.hello
                        and not fleet.required_identity
                        and not self._identities.lists(link.hello.model_identity)
                    ):
                        link.session.hang_up("its model is not listed any more")

    def _assign_role(self, link: WorkerLink) -> None:
        """Move a worker to the list of the role in its Hello: a worker may come back in the other role."""
        role = link.hello.roles[0]
        if self._role_of.get(link) == role:
            return  # this runs after every report of every worker
        self._role_of[link] = role
        links, others = (self.prefill, self.decode) if role == "prefill" else (self.decode, self.prefill)
        if link in others:
            others.remove(link)
            links.append(link)

    def _on_block_events(self, link: WorkerLink, events: pb.BlockEvents) -> None:
        self._index.apply(link.worker_id, events)

    def _on_link_change(self, link: WorkerLink) -> None:
        if link.hello is not None:
            self._assign_role(link)
        fleet = self._fleet_of.get(link)
        if not link.state.has_session:
            if worker := self._joined.pop(link, None):
                self._index.drop(worker)
        elif link not in self._joined:
            self._joined[link] = link.worker_id
            self._index.join(link.worker_id, link.subscribe)
        if fleet is not None:
            self._update(fleet, link)
        self._on_change()

    def _update(self, fleet: ModelFleet, link: WorkerLink) -> None:
        if link in self._joined:
            fleet.join(link)
        else:
            fleet.leave(link)
        fleet.update(link)

    def _excuses(self, fleet: ModelFleet, role: str) -> str:
        """Return why no worker of this role serves the model, or why none can exchange KV with the other role."""
        found = [why] if (why := fleet.router.why_no_pair()) else []
        away = (link for link in fleet.links(role) if not link.is_serving)
        found += [f"{link.address} {link.state.value}: {link.reason}" for link in away]
        found += [f"{name.address}: {name.reason}" for name in self._names if name.reason and name.role == role]
        found += self.registered.excuses(role)
        return "; ".join(found) or fleet.last_gone.get(role) or "none is configured, and none has registered"


def _make_directory(redis_url: str | None) -> WorkerDirectory:
    if not redis_url:
        return LocalDirectory()
    from gateway.discovery.redis_directory import RedisDirectory  # here, as redis is slow to load

    return RedisDirectory(redis_url)
