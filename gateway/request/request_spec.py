"""A checked request in the words of workers."""

import hashlib
from collections.abc import Sequence

from baton.service.codec import budget_ms
from baton.v1 import kv_pb2
from baton.v1 import worker_pb2 as pb
from gateway.link.worker_link import WorkerLink
from gateway.request.validation import Checked, Sampling


def make_spec(
    checked: Checked,
    prompt_ids: Sequence[int],
    output_ids: Sequence[int],
    max_tokens: int,
    span_hashes: Sequence[bytes],
    chain_parent: bytes,
    traceparent: str,
    deadline: float,
    tenant_mark: bytes = b"",
) -> pb.RequestSpec:
    """`span_hashes` and `chain_parent` are of prompt and output together. `deadline` is time.monotonic()."""
    spec = pb.RequestSpec(
        token_ids=prompt_ids,
        num_prompt_tokens=len(prompt_ids),
        sampling=_sampling(checked.sampling),
        max_tokens=max_tokens,
        min_tokens=checked.min_tokens,
        stop_token_ids=sorted(checked.stop_token_ids),
    )
    # All that an answer hangs on: the same from any gateway that is sent the same request.
    spec.fingerprint = hashlib.sha256(spec.SerializeToString(deterministic=True)).digest()
    spec.token_ids.extend(output_ids)
    spec.span_hashes.extend(span_hashes)
    spec.chain_parent = chain_parent
    spec.priority = checked.priority
    spec.tenant_mark = tenant_mark
    spec.traceparent = traceparent
    spec.budget_ms = budget_ms(deadline)
    spec.speculation.CopyFrom(checked.speculation)
    return spec


def make_taker(link: WorkerLink, num_cached_tokens: int) -> kv_pb2.Taker:
    """What the prefill worker must know of the decode worker."""
    hello = link.hello
    return kv_pb2.Taker(
        instance=hello.instance,
        epoch=hello.epoch,
        layout=hello.layout,
        numerics_class=hello.numerics_class,
        num_cached_tokens=num_cached_tokens,
        transports=hello.model.transports,
        host_id=hello.host_id,
    )


def _sampling(sampling: Sampling) -> pb.WorkerSampling:
    return pb.WorkerSampling(
        temperature=sampling.temperature,
        top_k=sampling.top_k,
        top_p=sampling.top_p,
        min_p=sampling.min_p,
        seed=sampling.seed,
        repetition_penalty=sampling.repetition_penalty,
        presence_penalty=sampling.presence_penalty,
        frequency_penalty=sampling.frequency_penalty,
        logit_bias=sampling.logit_bias,
        n=sampling.n,
        logprobs=sampling.logprobs,
    )
