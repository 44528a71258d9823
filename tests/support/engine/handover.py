"""Prompts read by one engine and answered by another, in one process."""

from collections.abc import Sequence

from baton.engine.core.request import FirstToken, PrefillDone, Refusal, Request
from baton.engine.engine import Engine
from kvtransfer.layout import BlockRef
from tests.support.engine.collector import Collector, Record, run_to_end


def copy_kv(source: Engine, source_refs: Sequence[BlockRef], target: Engine, target_refs: Sequence[BlockRef]) -> None:
    """Copy whole blocks from pool to pool, as a transport does."""
    for ours, theirs in zip(source_refs, target_refs, strict=True):
        target.pool.bytes[theirs.block_id] = source.pool.bytes[ours.block_id]


def hand_over(prefill: Engine, decode: Engine, requests: Sequence[Request]) -> tuple[Collector, Collector]:
    """Let one engine read every prompt and the other answer it. Returns (what the one gave out, what the other did)."""
    firsts, rest = Collector(), Collector(first_index=1)
    for request in requests:
        while True:
            try:
                num_cached = decode.admission.admit(request)
                break
            except Refusal:
                rest.take(decode.step())
        acceptance = prefill.admission.accept(request)
        while firsts[request.key].first is None:
            firsts.take(prefill.step())
        num_tokens = len(request.token_ids)
        skip = max(num_cached, decode.admission.skip(request.key, num_tokens)) // decode.layout.block_size
        refs = decode.admission.set_aside(request.key, num_tokens)
        copy_kv(prefill, acceptance.blocks[skip:], decode, refs[skip:])
        for mine, theirs in zip(decode.admission.state_blocks(request.key), acceptance.states, strict=True):
            decode.pool.states.of(mine.block_id).copy_(prefill.pool.states.of(theirs.block_id))
        decode.admission.verify(request.key, num_tokens)
        decode.admission.fetch_settled(request.key)
        decode.admission.start(request.key, going_on(firsts[request.key].first))
        prefill.admission.release_lease(request.key)
        rest.take(decode.step())
    run_to_end(decode, collector=rest)
    run_to_end(prefill, collector=firsts)
    return firsts, rest


def check_handed_over(firsts: Collector, rest: Collector, request: Request, whole: Record) -> None:
    """Check that the two halves of an answer are that of one engine alone, logprobs bit for bit."""
    for first in firsts[request.key].first.first_tokens:
        made = rest[request.key].tokens.get(first.choice, [])
        assert [first.token_id, *made] == whole.tokens[first.choice]
        if request.sampling.logprobs is not None and made:
            assert [first.logprobs, *rest[request.key].logprobs[first.choice]] == whole.logprobs[first.choice]


def going_on(done: PrefillDone) -> tuple[FirstToken, ...]:
    return tuple(first for first in done.first_tokens if first.finish_reason is None)
