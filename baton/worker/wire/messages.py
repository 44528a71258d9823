"""Convert between the session's protobuf and the engine's vocabulary. Raise a ValueError that names the bad field."""

from collections.abc import Iterable, Mapping
from dataclasses import fields

from baton.constraints.constraint import constraint_of
from baton.engine.core.pooling import Pooling, PoolingParams
from baton.engine.core.request import (
    DecodeReport,
    FinishReason,
    FirstToken,
    Key,
    LoadReport,
    PrefillDone,
    Request,
    Speculation,
    TokenLogprobs,
)
from baton.protocol import ADAPTER_BYTES, HOLDERS, MAX_DRAFT_TOKENS, MAX_PROMPT_LOGPROBS
from baton.sampling_params import SHIFT, SamplingParams
from baton.service.codec import deadline_of, key_to_proto
from baton.v1 import inference_pb2
from baton.v1 import worker_pb2 as pb
from baton.worker.wire.end_status import Status
from kvtransfer.naming import HASH_BYTES, SPAN_TOKENS
from kvtransfer.transfer.fetcher import FetchReport

_NO_BIAS: tuple[tuple[int, float], ...] = ()
# Bounds of one request: no lower than those of gateways, and low enough that no request fails or fills a step.
_MAX_CHOICES, _MAX_LOGPROBS, _MAX_BIASES = 64, 128, 1024
_COUNTS = ("logprobs", "prompt_logprobs")  # optional numbers of best tokens


def request_of(key: Key, spec: pb.RequestSpec, vocab_size: int) -> Request:
    """Return a Request whose deadline is on this process's clock. Raises ValueError that names the bad field."""
    token_ids = tuple(spec.token_ids)
    if not 1 <= spec.num_prompt_tokens <= len(token_ids):
        raise ValueError(f"num_prompt_tokens is {spec.num_prompt_tokens} of {len(token_ids)} token_ids")
    _check_ids("token_ids", token_ids, vocab_size)
    sampling = _sampling_of(spec.sampling, vocab_size)
    if sampling.prompt_logprobs is not None:
        num_asked = (sampling.prompt_logprobs + 1) * spec.num_prompt_tokens
        _check_range("sampling.prompt_logprobs times the prompt's tokens", num_asked, 0, MAX_PROMPT_LOGPROBS)
    stop_token_ids = frozenset(spec.stop_token_ids)
    _check_ids("stop_token_ids", stop_token_ids, vocab_size)
    if len(stop_token_ids) >= vocab_size:
        raise ValueError(f"stop_token_ids: all {vocab_size} of the vocabulary")
    if sampling.n != 1 and len(token_ids) != spec.num_prompt_tokens:
        raise ValueError(f"n is {sampling.n}, but a continued sequence has one choice")
    if spec.HasField("pooling"):
        return _pooled_request(key, spec, token_ids, sampling, vocab_size)
    if spec.max_tokens <= len(token_ids) - spec.num_prompt_tokens:
        raise ValueError(f"max_tokens is {spec.max_tokens}: nothing is left to produce")
    return Request(
        key=key,
        token_ids=token_ids,
        num_prompt_tokens=spec.num_prompt_tokens,
        sampling=sampling,
        max_tokens=spec.max_tokens,
        min_tokens=spec.min_tokens,
        stop_token_ids=stop_token_ids,
        span_hashes=_span_hashes_of(spec.span_hashes, len(token_ids) // SPAN_TOKENS),
        chain_parent=_hash_of(spec.chain_parent, "chain_parent"),
        priority=spec.priority,
        deadline=deadline_of(spec.budget_ms),
        speculation=_speculation_of(spec.speculation),
        tenant_mark=_mark_of(spec.tenant_mark),
        constraint=constraint_of(spec.constraint) if spec.HasField("constraint") else None,
        adapter=_adapter_of(spec.adapter),
    )


def _pooled_request(
    key: Key, spec: pb.RequestSpec, token_ids: tuple[int, ...], sampling: SamplingParams, vocab_size: int
) -> Request:
    """Return a request whose prompt is read and not answered. It has no span hashes, because nothing of it is
    cached."""
    if len(token_ids) != spec.num_prompt_tokens:
        raise ValueError(f"pooling: {len(token_ids)} token_ids, and only {spec.num_prompt_tokens} are of the prompt")
    asked = spec.pooling
    _check_range("the number of pooling.label_token_ids", len(asked.label_token_ids), 0, _MAX_LOGPROBS)
    _check_ids("pooling.label_token_ids", asked.label_token_ids, vocab_size)
    try:
        pooling = Pooling(asked.pooling or Pooling.LAST)
    except ValueError:
        raise ValueError(f"pooling.pooling is {asked.pooling}, which is not known here") from None
    return Request(
        key=key,
        token_ids=token_ids,
        num_prompt_tokens=len(token_ids),
        sampling=sampling,
        max_tokens=0,
        priority=spec.priority,
        deadline=deadline_of(spec.budget_ms),
        tenant_mark=_mark_of(spec.tenant_mark),
        pooling=PoolingParams(pooling, asked.normalize, asked.dimensions, tuple(asked.label_token_ids)),
        adapter=_adapter_of(spec.adapter),
    )


def _sampling_of(sampling: pb.WorkerSampling, vocab_size: int) -> SamplingParams:
    """Return the sampling parameters; the message has fields of the same names."""
    values = {each.name: getattr(sampling, each.name) for each in fields(SamplingParams)}
    for name in _COUNTS:
        count = values[name] if sampling.HasField(name) else None
        _check_range(f"sampling.{name}", count or 0, 0, min(_MAX_LOGPROBS, vocab_size))
        values[name] = count
    _check_range("sampling.n", sampling.n, 0, _MAX_CHOICES)
    values["logit_bias"] = _biases_of(sampling.logit_bias, vocab_size) if sampling.logit_bias else _NO_BIAS
    return SamplingParams(**values | {"n": sampling.n or 1})


def _biases_of(biases: Mapping[int, float], vocab_size: int) -> tuple[tuple[int, float], ...]:
    if len(biases) > _MAX_BIASES:
        raise ValueError(f"sampling.logit_bias has {len(biases)} entries, at most {_MAX_BIASES} are allowed")
    _check_ids("sampling.logit_bias", biases, vocab_size)
    for token_id, bias in biases.items():
        if problem := SHIFT.problem(bias):
            raise ValueError(f"sampling.logit_bias of {token_id} is {bias:g}: {problem}")
    return tuple(sorted(biases.items()))


def _check_ids(field: str, token_ids: Iterable[int], vocab_size: int) -> None:
    largest = max(token_ids, default=0)
    if largest >= vocab_size:
        raise ValueError(f"{field}: {largest} is not below the vocabulary's {vocab_size}")


def _check_range(field: str, value: float, least: float, most: float) -> None:
    if not least * 0.999 <= value <= most:  # floats lose precision on the wire; nan is in no range
        raise ValueError(f"{field} is {value:g}: {least:g} to {most:g}")


def _speculation_of(speculation: inference_pb2.Speculation) -> Speculation:
    num_tokens = speculation.num_tokens if speculation.HasField("num_tokens") else None
    if (num_tokens or 0) > MAX_DRAFT_TOKENS:
        raise ValueError(f"speculation.num_tokens is {num_tokens}, at most {MAX_DRAFT_TOKENS} are allowed")
    return Speculation(speculation.proposer, num_tokens)


def _mark_of(mark: bytes) -> bytes:
    if len(mark) > HASH_BYTES:
        raise ValueError(f"tenant_mark: at most {HASH_BYTES} bytes, got {len(mark)}")
    return mark


def _adapter_of(identity: bytes) -> bytes:
    if len(identity) not in (0, ADAPTER_BYTES):
        raise ValueError(f"adapter: an identity has {ADAPTER_BYTES} bytes, got {len(identity)}")
    return identity


def _span_hashes_of(hashes: Iterable[bytes], num_spans: int) -> tuple[bytes, ...]:
    hashes = tuple(hashes)
    if len(hashes) != num_spans:
        raise ValueError(f"span_hashes: {len(hashes)} for {num_spans} full spans")
    for value in hashes:
        _hash_of(value, "span_hashes")
    return hashes


def _hash_of(value: bytes, field: str) -> bytes:
    if len(value) != HASH_BYTES:
        raise ValueError(f"{field}: a hash has {HASH_BYTES} bytes, got {len(value)}")
    return value


def chain_of(chain: pb.SpanChain) -> tuple[bytes, ...]:
    """Return the hashes of an Offer. Raises ValueError if there are none."""
    if not chain.hashes:
        raise ValueError("spans.hashes is empty")
    return _span_hashes_of(chain.hashes, len(chain.hashes))


# ---- tokens ----


def logprobs_to_proto(entry: TokenLogprobs) -> inference_pb2.Logprobs:
    top = [inference_pb2.TokenLogprob(token_id=token_id, logprob=value) for token_id, value in entry.top]
    chosen = inference_pb2.TokenLogprob(token_id=entry.chosen[0], logprob=entry.chosen[1])
    return inference_pb2.Logprobs(chosen=chosen, top=top)


def _logprobs_of(entry: inference_pb2.Logprobs) -> TokenLogprobs:
    top = tuple((best.token_id, best.logprob) for best in entry.top)
    return TokenLogprobs((entry.chosen.token_id, entry.chosen.logprob), top)


def first_token_to_proto(first: FirstToken) -> pb.FirstToken:
    message = pb.FirstToken(choice=first.choice, token_id=first.token_id)
    if first.logprobs is not None:
        message.logprobs.CopyFrom(logprobs_to_proto(first.logprobs))
    if first.finish_reason is not None:
        message.finished = True
        message.finish_reason = first.finish_reason.value
    return message


def first_tokens_of(firsts: Iterable[pb.FirstToken], num_choices: int, vocab_size: int) -> tuple[FirstToken, ...]:
    """Return the first tokens of the choices that continue. Raises ValueError for a token or choice that does not
    exist, and for a choice given twice."""
    found = tuple(map(_first_token_of, firsts))
    choices = {first.choice for first in found}
    if len(choices) < len(found) or max(choices, default=0) >= num_choices:
        raise ValueError(f"first_tokens: choices {[first.choice for first in found]} of {num_choices}")
    _check_ids("first_tokens", [first.token_id for first in found], vocab_size)
    return found


def _first_token_of(first: pb.FirstToken) -> FirstToken:
    logprobs = _logprobs_of(first.logprobs) if first.HasField("logprobs") else None
    reason = FinishReason(first.finish_reason) if first.finish_reason else None
    return FirstToken(first.choice, first.token_id, logprobs, reason)


def done(key: Key, report: PrefillDone, pulled: pb.Pulled | None = None) -> pb.Event:
    message = pb.Done(
        key=key_to_proto(key),
        first_tokens=map(first_token_to_proto, report.first_tokens),
        queue_s=report.queue_s,
        prefill_s=report.prefill_s,
        num_cached_tokens=report.num_cached_tokens,
        num_chunks=report.num_chunks,
        prompt_logprobs=map(logprobs_to_proto, report.prompt_logprobs),
        pooled=report.pooled,
        waits=pb.Waits(place_s=report.waits.slot_s, block_s=report.waits.block_s),
        pulled=pulled,
    )
    return pb.Event(done=message)


# ---- endings and load ----


def ended(key: Key, status: Status, report: DecodeReport | None, kv_wait_s: float) -> pb.Event:
    message = pb.Ended(
        key=key_to_proto(key),
        code=status.code,
        reason=status.reason,
        message=status.message,
        retry_after_ms=round(status.retry_after_s * 1000),
    )
    if report is not None:
        message.decode.kv_wait_s = kv_wait_s
        message.decode.decode_queue_s = report.decode_queue_s
        message.decode.first_step_s = report.first_step_s
        message.decode.decode_s = report.decode_s
        message.decode.num_steps = report.num_steps
        message.decode.num_preemptions = report.num_preemptions
        message.decode.num_drafts = report.num_drafts
        message.decode.proposed_by_position.extend(report.proposed_by_position)
        message.decode.accepted_by_position.extend(report.accepted_by_position)
        message.decode.speedup = report.speedup
        message.decode.waits.place_s, message.decode.waits.block_s = report.waits
    return pb.Event(ended=message)


def fetched(key: Key, report: FetchReport) -> pb.Event:
    message = pb.Fetched(
        key=key_to_proto(key),
        num_tokens=report.num_tokens,
        num_bytes=report.num_bytes,
        transport=report.transport,
        transfer_s=report.transfer_s,
        after_last_ready_s=report.after_last_ready_s,
        num_bytes_early=report.num_bytes_early,
        numerics=report.numerics,
    )
    return pb.Event(fetched=message)


def refused(key: Key, reason: str, retry_after_s: float) -> pb.Event:
    return pb.Event(
        refused=pb.Refused(key=key_to_proto(key), reason=reason, retry_after_ms=round(retry_after_s * 1000))
    )


def load_to_proto(report: LoadReport, state: str, tables: Mapping[str, int], core_wait: float) -> pb.Load:
    blocks = [report.blocks_by_holder[holder] for holder in HOLDERS]
    return pb.Load(
        step=report.step,
        num_running=report.num_running,
        num_waiting=report.num_waiting,
        num_waiting_tokens=report.num_waiting_tokens,
        num_blocks_free=report.blocks_by_holder["free"] + report.blocks_by_holder["cached"],
        num_blocks_total=report.num_blocks_total,
        tokens_per_s=report.tokens_per_s,
        state=state,
        blocks_by_holder=blocks,
        tables=tables,
        num_draft_tokens=report.num_draft_tokens,
        num_accepted_tokens=report.num_accepted_tokens,
        core_wait=core_wait,
        ready_adapters=report.ready_adapters,
    )
