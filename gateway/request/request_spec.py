"""Turn a validated request into the messages that workers take."""

import hashlib
from collections.abc import Sequence

from baton.constraints.constraint import write_constraint
from baton.service.codec import budget_ms
from baton.service.observe.telemetry import TraceContext, format_traceparent
from baton.v1 import kv_pb2
from baton.v1 import worker_pb2 as pb
from gateway.link.worker_link import WorkerLink
from gateway.prefix.prefix_hashes import PrefixHashes, SpanHashes
from gateway.request.validation import ValidatedRequest
from kvtransfer.naming import SPAN_TOKENS, SpanHash


class SpecBuilder:
    """Build the RequestSpec of each attempt of one request."""

    __slots__ = (
        "_validated",
        "_prompt_ids",
        "_max_tokens",
        "_prefix_hashes",
        "_tenant",
        "_context",
        "_deadline",
        "_prompt_spans",
    )

    def __init__(
        self,
        validated: ValidatedRequest,
        prompt_ids: Sequence[int],
        max_tokens: int,
        prefix_hashes: PrefixHashes,
        tenant: str,
        context: TraceContext,
        deadline: float,
    ):
        """Build specs of a request with the span `context` and a `deadline` in time.monotonic()."""
        self._validated, self._prompt_ids, self._max_tokens = validated, prompt_ids, max_tokens
        self._prefix_hashes, self._tenant = prefix_hashes, tenant
        self._context, self._deadline = context, deadline
        self._prompt_spans: SpanHashes | None = None

    @property
    def traceparent(self) -> str:
        """The request's span, in the form sent to workers."""
        return format_traceparent(self._context)

    @property
    def reusable_spans(self) -> list[SpanHash]:
        """The hashes of the prompt's full spans that a worker may have cached; the last token is always computed.
        Raises Unavailable before a worker has said which model is served."""
        if self._validated.asks_for_prompt_logprobs:
            return []
        return self._hashed_prompt().hashes[: (len(self._prompt_ids) - 1) // SPAN_TOKENS]

    def build(self, output_ids: Sequence[int] = (), has_begun: bool = False) -> pb.RequestSpec:
        """Return the spec of an attempt that continues after `output_ids`. `has_begun`: the client has got the
        beginning of the answer, and the log-probabilities of the prompt with it."""
        validated = self._validated
        spec = pb.RequestSpec(
            token_ids=self._prompt_ids,
            num_prompt_tokens=len(self._prompt_ids),
            sampling=validated.sampling,
            max_tokens=self._max_tokens,
            min_tokens=validated.min_tokens,
            stop_token_ids=sorted(validated.stop_token_ids),
            adapter=validated.adapter,
        )
        if validated.constraint is not None:
            write_constraint(spec.constraint, validated.constraint)
        # Hashes all that an answer depends on: equal from every gateway that gets the same request.
        spec.fingerprint = hashlib.sha256(spec.SerializeToString(deterministic=True)).digest()
        if has_begun or not validated.asks_for_prompt_logprobs:
            spec.sampling.ClearField("prompt_logprobs")
        spec.token_ids.extend(output_ids)
        if not output_ids:
            span_hashes = self._hashed_prompt()
        else:
            span_hashes = self._prefix_hashes.spans(self._tenant, self._prompt_ids, output_ids, validated.adapter)
        spec.span_hashes.extend(span_hashes.hashes)
        spec.chain_parent = span_hashes.parent
        spec.priority = validated.priority
        spec.tenant_mark = self._prefix_hashes.mark(self._tenant)
        spec.traceparent = self.traceparent
        spec.budget_ms = budget_ms(self._deadline)
        spec.speculation.CopyFrom(validated.speculation)
        return spec

    def forget_spans(self) -> None:
        """Drop the hashes of the prompt's spans until another attempt needs them: one takes 73 bytes, beside the 256 of
        its token ids."""
        self._prompt_spans = None

    def _hashed_prompt(self) -> SpanHashes:
        if self._prompt_spans is None:
            adapter = self._validated.adapter
            self._prompt_spans = self._prefix_hashes.spans(self._tenant, self._prompt_ids, adapter=adapter)
        return self._prompt_spans


def pooled_spec(
    validated: ValidatedRequest,
    prompt_ids: Sequence[int],
    pooling: pb.PoolingSpec,
    tenant_mark: bytes,
    traceparent: str,
) -> pb.RequestSpec:
    """Return the spec of a prompt that is read and not answered."""
    return pb.RequestSpec(
        token_ids=prompt_ids,
        num_prompt_tokens=len(prompt_ids),
        sampling=validated.sampling,
        priority=validated.priority,
        tenant_mark=tenant_mark,
        traceparent=traceparent,
        pooling=pooling,
        adapter=validated.adapter,
    )


def make_taker(link: WorkerLink) -> kv_pb2.Taker:
    """Return what a source must know about the worker that takes its KV."""
    hello = link.hello
    return kv_pb2.Taker(
        instance=hello.instance,
        epoch=hello.epoch,
        layout=hello.layout,
        numerics_class=hello.numerics_class,
    )
