"""What requests are validated against: the served model, and presets of limits."""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from baton.protocol import MAX_INPUTS, MAX_PROMPT_LOGPROBS
from gateway.config.adapter_tenants import AdapterTenants
from gateway.config.slo_classes import BUILT_IN
from gateway.model.model_folder import Defaults


@dataclass(frozen=True, slots=True)
class RequestLimits:
    """Limits of one request."""

    choices: int = 8
    output_tokens: int = 524_288  # n x max_tokens
    max_tokens: int = 524_288  # no client is known to ask for more than 393,216
    default_max_tokens: int = 65_536  # at most, whatever the model's own default is
    output_logprobs: int = 1_441_792  # (k + 2) x n x max_tokens: about 15 MiB of a Complete message
    logprobs: int = 20
    prompt_logprobs: int = MAX_PROMPT_LOGPROBS  # (k + 1) x tokens of the prompt
    stops: int = 16
    stop_bytes: int = 256
    stop_token_ids: int = 1024
    logit_bias: int = 1024
    messages: int = 1024  # of a chat
    inputs: int = MAX_INPUTS


PRESETS = {
    "normal": RequestLimits(),
    "strict": RequestLimits(
        choices=4,
        output_tokens=4096,
        max_tokens=1024,
        default_max_tokens=128,
        output_logprobs=28_672,
        logprobs=5,
        prompt_logprobs=16_384,
        stops=4,
        stop_bytes=64,
        stop_token_ids=64,
        logit_bias=300,
        messages=128,
        inputs=16,
    ),
}


@dataclass(frozen=True, slots=True)
class ServedModel:
    """What requests depend on of a model and its workers."""

    name: str
    context: int  # the longest that a decode worker holds; the model's, if longer, until all workers have said
    vocab_size: int
    eos_ids: frozenset[int]
    defaults: Defaults
    slo_classes: frozenset[str] = frozenset(BUILT_IN)
    proposers: frozenset[str] | None = None  # run by decode workers; None: not all workers have said yet
    is_whole: bool = True  # every decode worker has said what it holds
    limits: RequestLimits = PRESETS["normal"]
    is_bound_by_workers: bool = False
    # The contexts that decode workers hold, the shortest first; the last one is `context` once all have said.
    lengths: tuple[int, ...] = ()
    # Adapters that decode workers hold: identity by name.
    adapters: Mapping[str, bytes] = field(default_factory=dict[str, bytes])
    adapter_tenants: AdapterTenants = field(default_factory=AdapterTenants)

    def seen_by(self, tenant: str) -> "ServedModel":
        """Return the model with only the adapters that a tenant may name."""
        allowed = {name: each for name, each in self.adapters.items() if self.adapter_tenants.may_name(tenant, name)}
        return self if len(allowed) == len(self.adapters) else replace(self, adapters=allowed)

    def find(self, asked: str) -> bytes | None:
        """Return the identity of the adapter that a request names, by its name or as `model:adapter`; b"" for the model
        itself; None if nothing of that name is served."""
        if asked in ("", self.name):
            return b""
        return self.adapters.get(asked) or self.adapters.get(asked.removeprefix(f"{self.name}:"))

    @property
    def context_label(self) -> str:
        """What `context` is, for errors, in words that clients search for."""
        known = "the maximum context length"
        return f"{known} that a decode worker here holds" if self.is_bound_by_workers else known
