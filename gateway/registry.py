"""The workers of this gateway: who serves, what model they serve, and who is told when that changes."""

import asyncio
import secrets
from collections.abc import Callable, Collection, Mapping

from baton.service.errors import Unavailable
from baton.v1 import worker_pb2 as pb
from gateway.limits import ServedModel
from gateway.model_folder import ModelFolder
from gateway.names import WorkerName, is_name
from gateway.prefix_index import PrefixIndex
from gateway.routing import Candidate, Decision, NoRoute, choose, choose_holder, choose_source, compatible
from gateway.secret import chain_root, derived_secret
from gateway.settings import GatewaySettings
from gateway.slo_classes import read_classes
from gateway.workers import LinkState, WorkerLink
from kvtransfer.naming import SPAN_TOKENS, ModelIdentity, SpanHash

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
        self._joined: dict[WorkerLink, bytes] = {}
        self._names: list[WorkerName] = []
        self.prefill = self._links("prefill", settings.prefill_workers)
        self.decode = self._links("decode", settings.decode_workers)

    @property
    def links(self) -> list[WorkerLink]:
        return self.prefill + self.decode

    @property
    def identity(self) -> ModelIdentity | None:
        """Of the model that is served: the first worker's, for as long as one of it is here."""
        return next((ModelIdentity(link.hello.model_identity) for link in self._joined if link.hello), None)

    @property
    def secret(self) -> bytes:
        """Raises Unavailable before it is known."""
        if self._secret is not None:
            return self._secret
        return derived_secret(self._known_identity())

    @property
    def root(self) -> SpanHash:
        """The parent of the first span. Raises Unavailable before it is known."""
        return chain_root(self._known_identity(), self.secret)

    @property
    def card(self) -> pb.ModelCard | None:
        """What a decode worker says of the model."""
        return next((link.hello.model for link in self.decode if link.serving and link.hello), None)

    @property
    def model(self) -> ServedModel:
        """What requests are checked against: the folder, within what workers can hold."""
        folder = self._folder
        said = [link.hello for link in self.decode if link.serving and link.hello]
        lengths = [hello.limits.max_model_len for hello in said]
        return ServedModel(
            name=folder.name,
            context=min(folder.context, max(lengths, default=folder.context)),
            vocab_size=folder.vocab_size,
            eos_ids=folder.eos_ids,
            defaults=folder.defaults,
            slo_classes=self._slo_classes,
            proposers=frozenset(name for hello in said for name in hello.model.proposers) if said else None,
        )

    async def run(self) -> None:
        """Keeps all sessions, until cancelled."""
        async with asyncio.TaskGroup() as group:
            for link in self.links:
                group.create_task(link.run(), name=f"link {link.address}")
            for name in self._names:
                group.create_task(name.follow(group, lambda: self.on_change()), name=f"name {name.address}")

    def not_ready(self) -> str | None:
        """Why no request could be served now, or None."""
        takers = [self._candidate(link, {}) for link in self.decode if link.serving]
        if not takers:
            return "no decode worker serves: " + self._excuses(self.decode)
        if self._settings.split != "always":
            return None
        sources = [self._candidate(link, {}) for link in self.prefill if link.serving]
        if any(compatible(source, taker) for source in sources for taker in takers):
            return None
        return "no prefill worker serves that a decode worker can take KV from: " + self._excuses(self.prefill)

    def route(
        self, num_tokens: int, max_len: int, matches: Mapping[bytes, int], avoid: Collection[bytes]
    ) -> tuple[Decision, WorkerLink | None, WorkerLink]:
        """(decision, prefill link, decode link); those in `avoid` only if there is nobody else. Raises Unavailable."""
        try:
            return self._route(num_tokens, max_len, matches, avoid)
        except NoRoute:
            pass
        try:
            return self._route(num_tokens, max_len, matches, ())
        except NoRoute as error:
            raise Unavailable(str(error), _RETRY_AFTER_S, reason="NO_WORKER") from None

    def others(self, links: list[WorkerLink], avoid: Collection[bytes]) -> bool:
        """Whether any of `links` serves that is not in `avoid`."""
        return any(link.serving and link.worker_id not in avoid for link in links)

    def source_for(
        self, taker: WorkerLink, num_tokens: int, matches: Mapping[bytes, int], avoid: Collection[bytes]
    ) -> WorkerLink | None:
        """A prefill worker that `taker` can take KV from; None: it reads the prompt itself. Raises Unavailable."""
        here = self._candidate(taker, matches)
        for avoided in (avoid, ()):
            sources = self._candidates(self.prefill, matches, avoided)
            if best := choose_source(num_tokens, list(sources.values()), here):
                return next(link for link, candidate in sources.items() if candidate is best)
        if self._settings.split == "always":
            raise Unavailable("no prefill worker serves", _RETRY_AFTER_S, reason="NO_WORKER")
        return None

    def holder_for(
        self, reader: WorkerLink, matches: Mapping[bytes, int], avoid: Collection[bytes]
    ) -> WorkerLink | None:
        """Whom `reader` should pull a prefix from before it prefills the rest; None: nobody, or it is not worth it."""
        holders = self._candidates([link for link in self.links if link is not reader], matches, avoid)
        best = choose_holder(self._candidate(reader, matches), list(holders.values()))
        return next((link for link, candidate in holders.items() if candidate is best), None)

    def _route(self, num_tokens, max_len, matches, avoid):
        prefill = self._candidates(self.prefill, matches, avoid)
        decode = self._candidates(self.decode, matches, avoid)
        decision = choose(num_tokens, max_len, list(prefill.values()), list(decode.values()), self._settings.split)
        by_name = {candidate.name: link for link, candidate in (prefill | decode).items()}
        return decision, by_name.get(decision.prefill), by_name[decision.decode]

    def _candidates(self, links, matches, avoid) -> dict[WorkerLink, Candidate]:
        usable = (link for link in links if link.serving and link.hello and link.worker_id not in avoid)
        return {link: self._candidate(link, matches) for link in usable}

    def _candidate(self, link: WorkerLink, matches: Mapping[bytes, int]) -> Candidate:
        """Loads are reports from a moment ago; what this gateway has sent since is known exactly."""
        hello, load = link.hello, link.load
        return Candidate(
            name=link.address,
            num_matched_tokens=matches.get(link.worker_id, 0) * SPAN_TOKENS,
            num_sequences=max(load.num_running + load.num_waiting, len(link.legs)),
            num_waiting_tokens=max(load.num_waiting_tokens, sum(leg.num_prefill_tokens for leg in link.legs.values())),
            max_model_len=hello.limits.max_model_len,
            kv_gives=frozenset(hello.kv_gives),
            kv_takes=frozenset(hello.kv_takes),
            transports=frozenset(hello.model.transports),
            host_id=hello.host_id,
            kv_token_bytes=hello.kv_token_bytes,
            prefill_tokens_per_s=link.prefill_tokens_per_s,
        )

    def _links(self, role: str, addresses: Collection[str]) -> list[WorkerLink]:
        """Those of plain addresses; a name brings its own once it is looked up."""
        links = [self._link(role, address) for address in addresses if not is_name(address)]
        names = [address for address in addresses if is_name(address)]
        self._names += [WorkerName(name, links, lambda address: self._link(role, address)) for name in names]
        return links

    # ---- what links call ----

    def _link(self, role: str, address: str) -> WorkerLink:
        return WorkerLink(
            address,
            self.instance,
            check_hello=lambda hello: self._why_not(hello, role),
            on_change=self._on_link_change,
            on_block_events=lambda link, events: self._index.apply(link.worker_id, events),
            max_unread_tokens=self._settings.max_unread_tokens,
        )

    def _why_not(self, hello: pb.Hello, role: str) -> str | None:
        if role not in hello.roles:
            return f"is a {'/'.join(hello.roles)} worker, and stands in --{role}-workers"
        if hello.tokenizer_digest != self._folder.tokenizer_digest:
            return f"has another tokenizer.json than {self._folder.path}"
        if self.identity not in (None, hello.model_identity):
            return f"serves another model than the workers that came first: config or weights differ"
        if hello.model.vocab_size != self._folder.vocab_size:
            config = self._folder.path / "config.json"
            return f"has {hello.model.vocab_size} token ids, {config} has {self._folder.vocab_size}"
        return None

    def _on_link_change(self, link: WorkerLink) -> None:
        if link.state in (LinkState.CONNECTING, LinkState.REFUSED):
            if worker := self._joined.pop(link, None):
                self._index.drop(worker)
        elif link not in self._joined:
            self._joined[link] = link.worker_id
            self._index.join(link.worker_id, link.subscribe)
        self.on_change()

    def _known_identity(self) -> ModelIdentity:
        if (identity := self.identity) is None:
            raise Unavailable("no worker has said yet which model it serves", _RETRY_AFTER_S, reason="NO_WORKER")
        return identity

    def _excuses(self, links: list[WorkerLink]) -> str:
        found = [f"{link.address} {link.state.value}: {link.reason}" for link in links]
        found += [f"{name.address}: {name.reason}" for name in self._names if name.reason and name.is_of(links)]
        return "; ".join(found) or "none is configured"
