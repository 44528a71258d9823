"""Define a request as it enters the engine, and the outputs that leave it. schedule/states.py has its states."""

from dataclasses import dataclass, field
from enum import Enum
from typing import Any, NamedTuple

from baton.constraints.constraint import Constraint
from baton.engine.core.pooling import PoolingParams
from baton.sampling_params import SamplingParams
from kvtransfer.layout import BlockRef


class Key(NamedTuple):
    """The name of one attempt at one request; every command and every output carries it."""

    request_id: str
    attempt: int = 0


@dataclass(frozen=True, slots=True)
class Speculation:
    """What a request asks of speculation. It changes the speed of an answer, never its tokens."""

    proposer: str = ""  # a proposer of the worker, or off; empty: the worker chooses
    num_tokens: int | None = None  # proposed in each step; None: the worker chooses


@dataclass(frozen=True, slots=True)
class Request:
    """A checked request. `token_ids` is the prompt, followed after a migration by the output so far (then n is 1)."""

    key: Key
    token_ids: tuple[int, ...]
    num_prompt_tokens: int
    sampling: SamplingParams
    max_tokens: int
    min_tokens: int = 0
    stop_token_ids: frozenset[int] = frozenset()  # with the end-of-sequence ids unless ignore_eos
    span_hashes: tuple[bytes, ...] = ()  # of token_ids, one for each full 64 tokens
    chain_parent: bytes = b"\0" * 32  # parent of the next span
    priority: int = 0
    deadline: float = float("inf")  # time.monotonic()
    speculation: Speculation = Speculation()
    tenant_mark: bytes = b""  # the tenant, opaque: tenants share slots and KV evenly
    constraint: Constraint | None = None  # on the answer's text
    pooling: PoolingParams | None = None  # if set, the prompt is computed for this and not answered
    adapter: bytes = b""  # identity of its LoRA adapter; empty: none
    # The distinct tokens of the prompt, an array, once a repetition penalty has needed them; the loop's sampler fills
    # it.
    prompt_seen: list[Any] = field(default_factory=list, init=False, repr=False, compare=False)

    @property
    def reads_cache(self) -> bool:
        """Whether a cached prefix may replace a part of the prompt: not if outputs of each prompt token are asked
        for."""
        return self.sampling.prompt_logprobs is None and self.pooling is None


class FinishReason(Enum):
    STOP = 1
    LENGTH = 2


class TokenLogprobs(NamedTuple):
    """Log-softmax of the raw logits: the chosen token and the k best, best first."""

    chosen: tuple[int, float]
    top: tuple[tuple[int, float], ...]


# ---- outputs of steps ----


@dataclass(frozen=True, slots=True)
class Progress:
    """KV of a held prefill is written, as the device has confirmed: tokens before `upto_token`, layers below
    `upto_layer`."""

    key: Key
    upto_token: int
    upto_layer: int


@dataclass(frozen=True, slots=True)
class FirstToken:
    choice: int
    token_id: int
    logprobs: TokenLogprobs | None = None
    finish_reason: FinishReason | None = None


class Waits(NamedTuple):
    """Seconds for which a request waited because there was no room for it."""

    slot_s: float = 0.0  # for a slot in the batch
    block_s: float = 0.0  # for KV blocks


@dataclass(frozen=True, slots=True)
class PrefillDone:
    key: Key
    first_tokens: tuple[FirstToken, ...]
    queue_s: float
    prefill_s: float
    num_cached_tokens: int
    num_chunks: int
    # Of each token of the prompt but the first, if they are asked for.
    prompt_logprobs: tuple[TokenLogprobs, ...] = ()
    pooled: tuple[float, ...] = ()  # the result of a request with `pooling`, which has no first tokens
    waits: Waits = Waits()  # of queue_s


@dataclass(frozen=True, slots=True)
class TokenRun:
    """Tokens of one choice, in order; `first_index` is the output index of the first."""

    key: Key
    choice: int
    first_index: int
    token_ids: tuple[int, ...]
    logprobs: tuple[TokenLogprobs, ...] = ()
    finish_reason: FinishReason | None = None


@dataclass(frozen=True, slots=True)
class DecodeReport:
    decode_queue_s: float = 0.0  # from the start of decoding to the first launched step
    first_step_s: float = 0.0
    decode_s: float = 0.0
    num_steps: int = 0
    num_preemptions: int = 0
    preempted_at: tuple[float, ...] = ()  # time.monotonic() of the first few
    # Speculation: steps of a choice with a draft, and tokens by position after the last one.
    num_drafts: int = 0
    proposed_by_position: tuple[int, ...] = ()
    accepted_by_position: tuple[int, ...] = ()
    speedup: float = 1.0  # against plain steps as this engine measured them, over decode_s
    waits: Waits = Waits()  # of decode_queue_s and decode_s

    @property
    def num_draft_tokens(self) -> int:
        return sum(self.proposed_by_position)

    @property
    def num_accepted_tokens(self) -> int:
        return sum(self.accepted_by_position)

    @property
    def acceptance_by_position(self) -> list[float]:
        """The share of accepted proposals at each position."""
        pairs = zip(self.accepted_by_position, self.proposed_by_position, strict=True)
        return [accepted / proposed for accepted, proposed in pairs]


@dataclass(frozen=True, slots=True)
class RequestEnded:
    """The end of a request, exactly one for each key. `error` is empty if the request finished normally."""

    key: Key
    # cancelled | deadline | constraint (it allows no token) | failed (alone in its step) | failed_together (with
    # others)
    error: str = ""
    message: str = ""
    report: DecodeReport = field(default_factory=DecodeReport)


Output = Progress | PrefillDone | TokenRun | RequestEnded


# ---- answers from the ledger ----


class Refusal(Exception):
    """A request that the engine does not admit now.

    `reason`: kv_full | queue_full | draining | too_long | no_adapter | adapter_loading | adapter_slots.
    """

    def __init__(self, reason: str, retry_after_s: float = 0.1):
        super().__init__(reason)
        self.reason = reason
        self.retry_after_s = retry_after_s


@dataclass(frozen=True, slots=True)
class Acceptance:
    """The blocks of the whole prompt of a held prefill or an offer; the first `num_cached_tokens` tokens are ready
    now."""

    blocks: tuple[BlockRef, ...]
    num_cached_tokens: int
    states: tuple[BlockRef, ...] = ()  # for models whose layers keep one: the state after the last token


@dataclass(frozen=True, slots=True)
class LoadReport:
    step: int
    num_running: int
    num_waiting: int
    num_waiting_tokens: int
    num_blocks_total: int
    blocks_by_holder: dict[str, int]  # quarantined, fetching, leased, running, cached, free
    tokens_per_s: float
    num_draft_tokens: int = 0  # proposed and accepted since the start
    num_accepted_tokens: int = 0
    ready_adapters: tuple[bytes, ...] = ()  # identities of adapters in slots; empty if slots are unbounded
