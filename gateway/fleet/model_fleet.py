"""The workers of one model: which of them serve, which model they serve, and what requests are checked against."""

import asyncio
import contextlib
import logging
from collections import Counter
from collections.abc import Callable, Sequence

from baton.protocol import ADAPTER_BYTES, CONSTRAINTS, PROMPT_LOGPROBS, check_model_name
from baton.service.clock import now
from baton.service.errors import InvalidRequest, NoWorker
from baton.service.logs import fields
from baton.v1 import worker_pb2 as pb
from gateway.config.adapter_tenants import AdapterTenants
from gateway.config.served_model import PRESETS, ServedModel
from gateway.config.settings import GatewaySettings
from gateway.discovery.worker_directory import stack_of
from gateway.fleet.candidates import Candidates
from gateway.fleet.router import Router
from gateway.link.worker_link import WorkerLink
from gateway.model.model_folder import ModelFolder
from gateway.model.model_identities import ModelIdentities
from gateway.prefix.cluster_secret import derived_secret
from gateway.routing.latency_model import PaceEstimator
from gateway.routing.routing import RoutingRequest, can_decode, describe_needs
from kvtransfer.naming import ModelIdentity

_LOOK_S = 0.25  # between two looks whether a worker may still come, which may lapse without an event
_FEATURE_FIELDS = {CONSTRAINTS: "constraint", PROMPT_LOGPROBS: "sampling.prompt_logprobs"}  # that need a feature

log = logging.getLogger(__name__)


class ModelFleet:
    """The workers of one model; `router` chooses among those that serve. Belongs to the event loop.

    A fleet that `is_retired` gets no new requests."""

    def __init__(
        self,
        folder: ModelFolder,
        settings: GatewaySettings,
        links: Callable[[str], Sequence[WorkerLink]],
        identities: ModelIdentities,
        slo_classes: frozenset[str],
        adapter_tenants: AdapterTenants,
        secret: bytes | None = None,
        required_identity: bytes = b"",
    ):
        """`links(role)` returns the model's workers, and workers that have not said yet what they serve, whatever their
        state. `secret` None: it is derived from the model's identity. `required_identity`: the only identity that its
        workers may have; empty: `identities` decides."""
        self.folder, self.links, self.required_identity = folder, links, required_identity
        self.stack = stack_of(folder.name, folder.path)
        self.is_retired = False
        self.excludes_its_workers = True  # once the fleet is dropped, its workers may not serve under another name
        self.pace_estimator = PaceEstimator()  # over all its workers
        self.candidates = Candidates(links)
        self.router = Router(
            self.candidates, settings.split, self.pace_estimator, settings.max_start_wait_s, settings.stand_in
        )
        self.last_identity = b""  # the identity of its workers; kept while none is here
        self.last_gone: dict[str, str] = {}  # role -> the last worker that was forgotten, and why it had no session
        # From its folder, or from its workers if they stretch it by rope scaling; kept while none is here.
        self._model_context = folder.context
        self._settings, self._identities = settings, identities
        self._slo_classes, self._adapter_tenants = slo_classes, adapter_tenants
        self._secret = secret
        self._joined: dict[WorkerLink, None] = {}  # in the order in which they joined
        self._has_joined = asyncio.Event()  # set by a worker that joins
        self._configured_identity = b""  # of a worker whose address is in the settings
        self._model: tuple[int, ServedModel] | None = None  # (num_changes of the candidates, what is served)
        self._adapters: dict[str, bytes] = {}  # identity by name
        self._why_no_pair = ""  # as it was logged last

    @property
    def name(self) -> str:
        """The name by which requests ask for it."""
        return self.folder.name

    @property
    def identity(self) -> ModelIdentity | None:
        """The identity of the model that is served: that of the first joined worker that is still here."""
        return next((ModelIdentity(link.hello.model_identity) for link in self._joined if link.hello), None)

    def known_identity(self) -> ModelIdentity:
        """Return the identity of the model that is served. Raises NoWorker before it is known."""
        if (identity := self.identity) is None:
            message = f"no worker serves {self.name}: none has said Hello, or all have gone"
            raise NoWorker(message)
        return identity

    @property
    def secret(self) -> bytes:
        """The cluster secret. Raises NoWorker before it is known."""
        return derived_secret(self.known_identity()) if self._secret is None else self._secret

    async def await_identity(self, deadline: float) -> None:
        """Wait until a worker has reported which model is served. Raises NoWorker if none may come, or none came."""
        most_s = self._settings.max_start_wait_s
        until = min(deadline, now() + most_s)
        while self.identity is None and now() < until and any(link.may_come(most_s) for link in self._all_links()):
            self._has_joined.clear()
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(min(_LOOK_S, until - now())):
                    await self._has_joined.wait()
        self.known_identity()

    @property
    def card(self) -> pb.ModelCard | None:
        """The model card of a serving worker, if possible a decode worker, or None."""
        return next((link.hello.model for link in self._all_links() if link.is_serving and link.hello), None)

    @property
    def model(self) -> ServedModel:
        """The model that requests are checked against.

        As every request asks for it, it is made again only when other workers serve, or while it is not known what all
        of them hold."""
        if self._model is None or self._model[0] != self.candidates.num_changes:
            if self._expects_unknown:
                return self._served_model(is_whole=False)
            self._model = self.candidates.num_changes, self._served_model(is_whole=True)
        return self._model[1]

    def not_ready(self) -> str | None:
        """Return why no request could be served now, or None."""
        if self.router.can_serve():
            return None
        if not self.candidates.serving("decode"):
            return "no decode worker serves"
        return "no prefill worker serves that a decode worker can take KV from"

    def check_fits(self, request: RoutingRequest) -> None:
        """Raise InvalidRequest for a request that no known decode worker can serve: it needs a feature or more
        blocks."""
        if self._expects_unknown:
            return  # an unknown worker may be able to: the request waits for it
        known = {link.limits for link in self.links("decode") if link.limits}
        for feature in sorted(request.features) if known else ():
            if not any(feature in limits.features for limits in known):
                raise InvalidRequest(_FEATURE_FIELDS.get(feature, "model"), "no decode worker that serves can do this")
        if known and not any(can_decode(request._replace(num_choices=1), limits) for limits in known):
            raise InvalidRequest("model", f"no decode worker that serves can hold {describe_needs(request)}")
        if known and not any(can_decode(request, limits) for limits in known):
            most = max(limits.num_blocks for limits in known)
            why = f"the prompt's end needs a KV block for each choice, and the largest decode worker has {most} blocks"
            raise InvalidRequest("sampling.n", f"{request.num_choices}: {why}")

    def can(self, feature: str) -> bool:
        """Return whether a serving decode worker has this feature."""
        return any(link.limits and feature in link.limits.features for link in self.candidates.serving("decode"))

    # ---- what the registry calls ----

    def misfit(self, hello: pb.Hello) -> str | None:
        """Return why a worker cannot serve this model, whatever its weights, or None if it can."""
        folder = self.folder
        if hello.tokenizer_digest != folder.tokenizer_digest:
            return f"has another tokenizer.json than {folder.path}"
        if hello.model.vocab_size != folder.vocab_size:
            return f"has {hello.model.vocab_size} token ids, {folder.path / 'config.json'} has {folder.vocab_size}"
        return next(filter(None, map(_wrong_adapter, hello.adapters)), None)

    def has(self, identity: bytes) -> bool:
        """Return whether this model has that identity: its workers have or had it, or it was added with it."""
        return identity in (self.last_identity, self.required_identity)

    def check_identity(self, identity: bytes, is_configured: bool) -> str | None:
        """Return why a worker with this model's tokenizer and that identity cannot be used, or None.

        `is_configured`: the worker's address is from the settings."""
        if not self.required_identity:
            return self._identities.why_not(identity, self.identity, is_configured, self._configured_identity)
        if identity != self.required_identity:
            return f"serves the model {identity.hex()}, {self.name} was added as {self.required_identity.hex()}"
        return None

    def trust_identity(self, identity: bytes) -> None:
        """Accept this identity from now on: a worker whose address is in the settings has it."""
        self._configured_identity = identity

    def join(self, link: WorkerLink) -> None:
        """Add a worker whose session has begun."""
        self._joined[link] = None
        self._has_joined.set()
        if (hello := link.hello) is not None:
            known = self._model_context if hello.model_identity == self.last_identity else self.folder.context
            self._model_context = max(known, hello.limits.model_context)
            self.last_identity = hello.model_identity

    def leave(self, link: WorkerLink) -> None:
        """Remove a worker whose session has ended."""
        self._joined.pop(link, None)

    def update(self, link: WorkerLink) -> None:
        """Note a change of a worker: it may have begun or ceased to serve, or hold other adapters."""
        num_changes = self.candidates.num_changes
        self.candidates.update(link)
        if self.candidates.num_changes != num_changes:
            self._note_adapters()
            self._log_why_no_pair()

    def forget(self) -> None:
        """Drop the cached ServedModel: a worker will not come back, or a new one may come."""
        self._model = None

    @property
    def _expects_unknown(self) -> bool:
        """Return whether a decode worker may come to serve that has never said what it can hold, as after a start."""
        return self.candidates.expects_unknown("decode", self._settings.max_start_wait_s)

    def _all_links(self) -> list[WorkerLink]:
        return [*self.links("decode"), *self.links("prefill")]

    def _note_adapters(self) -> None:
        """Keep the adapters that decode workers hold.

        While no decode worker serves they stay known, so that requests that name one wait as others do."""
        if decode := self.candidates.serving("decode"):
            self._adapters = _adapters_of(decode)
        else:
            self._adapters = self._adapters | _adapters_of(self.router.decode_workers())

    def _log_why_no_pair(self) -> None:
        """Log once why no decode worker can take KV from a prefill worker: prompts wait, or prefill workers are
        idle."""
        why = "" if self._settings.split == "never" else self.router.why_no_pair()
        if why and why != self._why_no_pair:
            log.warning("no decode worker can take KV from a prefill worker %s", fields(model=self.name, why=why))
        self._why_no_pair = why

    def _served_model(self, is_whole: bool) -> ServedModel:
        """Return the model as the workers that are known now serve it. `is_whole`: no unknown decode worker may
        come."""
        folder = self.folder
        hellos = [link.hello for link in self.candidates.serving("decode") if link.hello]
        # Of all workers that have been here: a request is not wrong because the worker that could hold it restarts.
        lengths = [link.limits.max_model_len for link in self.links("decode") if link.limits]
        # As workers report it, even if config.json says less: yarn, linear and dynamic rope scaling stretch it.
        context = max(lengths if lengths and is_whole else [self._model_context, *lengths])
        return ServedModel(
            name=folder.name,
            context=context,
            is_bound_by_workers=context < self._model_context,
            lengths=tuple(sorted(set(lengths))),
            vocab_size=folder.vocab_size,
            eos_ids=folder.eos_ids,
            defaults=folder.defaults,
            slo_classes=self._slo_classes,
            proposers=frozenset(name for hello in hellos for name in hello.model.proposers)
            if hellos and is_whole
            else None,
            is_whole=is_whole,
            limits=PRESETS[self._settings.limits],
            adapters=self._adapters,
            adapter_tenants=self._adapter_tenants,
        )


def _adapters_of(links: Sequence[WorkerLink]) -> dict[str, bytes]:
    """Return adapter name -> identity. If workers differ, as during a reload, it is the one that most of them hold."""
    held: dict[str, Counter[bytes]] = {}
    for link in links:
        for adapter in link.hello.adapters if link.hello else ():
            held.setdefault(adapter.name, Counter())[adapter.identity] += 1
    return {name: max(counts, key=lambda identity: (counts[identity], identity)) for name, counts in held.items()}


def _wrong_adapter(adapter: pb.Adapter) -> str | None:
    try:
        check_model_name(adapter.name, "has an adapter named")
    except ValueError as error:
        return str(error)
    size = len(adapter.identity)
    return None if size == ADAPTER_BYTES else f"has an adapter {adapter.name} with an identity of {size} bytes"
