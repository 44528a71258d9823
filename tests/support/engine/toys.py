"""An engine over a toy model that shows any block mixed up: its KV is the tokens themselves.

K of a token is (token id, position); the next token's logits are a hash of all tokens as they are read back from
the pool. A block that was shared, copied, evicted or fetched wrongly changes the answer, and a position out of place
raises.
"""

import random
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from types import SimpleNamespace

import torch

from baton.engine.core.batch import SeqSlice
from baton.engine.core.config import EngineConfig
from baton.engine.core.request import (
    FinishReason,
    FirstToken,
    Key,
    Output,
    PrefillDone,
    Progress,
    Refusal,
    Request,
    RequestEnded,
    TokenRun,
)
from baton.engine.engine import Engine
from baton.engine.execute.launcher import LaunchedTokens, Launcher
from baton.engine.kv.block_pages import num_block_ids
from baton.engine.kv.pool import KVPool
from baton.engine.sampling.sampler import Sampler, SampleRow
from baton.sampling_params import SamplingParams
from kvtransfer.layout import STATE, BlockRef, KVGroup, KVLayout
from kvtransfer.naming import SpanHash, chain_hashes

VOCAB = 97
PRIME = 1_000_003
ROOT = SpanHash(b"root" * 8)


def toy_logits(token_ids: Sequence[int]) -> torch.Tensor:
    """Logits [VOCAB] after these tokens: pure."""
    state = len(token_ids)
    for token_id in token_ids:
        state = (state * 31 + token_id + 7) % PRIME
    return _logits_of(state)


@lru_cache(1 << 14)
def _logits_of(state: int) -> torch.Tensor:
    values = (torch.arange(VOCAB, dtype=torch.int64) * 7919 + 1) * (state + 3) % PRIME
    return values.float() / PRIME * 6


class ToyModel:
    """The interface of a model, counting its steps; `before_forward` is called with the batch. `windows`: of each
    layer, the tokens that it sees at most; None: all. Its answer is made of what the last layer sees; the others check
    what they see."""

    def __init__(self, max_model_len: int, windows: tuple[int | None, ...] = (None,)):
        self.attention = SimpleNamespace(name="toy", skips_outside=True)
        self.fused = None
        kv_window, partial_window = (windows[-1], None) if len(windows) == 1 else (None, windows[0])
        self.spec = SimpleNamespace(
            context=max_model_len, vocab_size=VOCAB, windows=windows, kv_window=kv_window, partial_window=partial_window
        )
        self.before_forward = lambda batch: None
        self.batch_sizes: list[tuple[int, int]] = []  # sequences, tokens

    def hidden(self, batch, pool, on_layer=None) -> torch.Tensor:
        """The logits themselves, in the rows that are wanted."""
        self.before_forward(batch)
        self.batch_sizes.append((len(batch.seqs), len(batch.token_ids)))
        rows = torch.stack([batch.token_ids, batch.positions], 1).float().unsqueeze(1)
        rows = torch.nn.functional.pad(rows, (0, pool.group.head_dim - 2))
        assert len(set(batch.slots.tolist())) == len(batch.slots), "two tokens in one slot"
        for layer in range(pool.group.num_layers):
            pool.write(layer, batch.slots, rows, rows)
        if pool.states is not None:
            for piece in batch.seqs:
                fold(piece, batch.token_ids, pool)
        found, wanted = torch.zeros(len(batch.token_ids), VOCAB), batch.logit_rows.tolist()
        for piece in batch.seqs:
            k, _ = pool.gather(len(self.spec.windows) - 1, piece.block_ids, piece.kv_len)
            window = self.spec.windows[-1] or piece.kv_len
            seen = torch.arange(max(0, piece.kv_len - piece.query_len + 1 - window), piece.kv_len)
            assert torch.equal(k[0, seen, 1], seen.float()), "a token out of its place"
            for layer, window_of_layer in enumerate(self.spec.windows[:-1]):
                first = max(0, piece.kv_len - piece.query_len + 1 - window_of_layer)
                before = first // pool.block_size
                own, _ = pool.gather(layer, piece.block_ids[before:], piece.kv_len - before * pool.block_size)
                assert torch.equal(own[0, first - piece.kv_len :], k[0, first:]), "layers differ"
            tokens = k[0, :, 0].long().tolist()
            for row in range(piece.query_start, piece.query_start + piece.query_len):
                if row in wanted:
                    num_seen = piece.kv_len - piece.query_len + row - piece.query_start + 1
                    found[row] = toy_logits(tokens[max(0, num_seen - window) : num_seen])
        return found

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        return hidden

    def normed(self, hidden: torch.Tensor) -> torch.Tensor:
        return hidden


def fold(piece: SeqSlice, token_ids: torch.Tensor, pool: KVPool) -> None:
    """Fold a sequence's certain tokens into its state, [tokens folded, their hash], which must be that of all
    before."""
    state, kept = pool.states.of(piece.state.state_id)[0], piece.kv_len - piece.state.num_drafts
    begin = piece.kv_len - piece.query_len - piece.state.num_pending
    k, _ = pool.gather(0, piece.block_ids, kept)
    seen = k[0, :, 0].long().tolist()
    if begin:
        assert state[:2].tolist() == [begin, _folded(seen[:begin])], (
            "the state of another sequence, or of another place"
        )
    state[0], state[1] = kept, _folded(seen)


def _folded(token_ids: Sequence[int]) -> float:
    """Return a hash that fp32 holds exactly."""
    found = 1
    for token_id in token_ids:
        found = (found * 31 + token_id + 7) % 65_521
    return float(found)


def toy_engine(*proposers, window: int | None = None, windows: tuple[int | None, ...] = (), **options) -> Engine:
    """Options of EngineConfig; small by default. `num_states`: its one layer keeps a state too. `window`: it sees no
    further. `windows`: of several layers."""
    defaults = dict(
        checkpoint_tokens=128,
        block_size=16,
        num_blocks=64,
        max_num_seqs=4,
        max_model_len=512,
        max_num_batched_tokens=128,
    )
    config = EngineConfig(model=Path("toy"), dtype="fp32", kv_dtype="fp32", **(defaults | options))
    windows, size = windows or (window,), 64 if windows else 2  # of several layers each has whole pages of a block
    groups = [KVGroup("paged", len(windows), 1, size, "fp32", config.block_size)]
    if config.num_states is not None:
        groups.append(KVGroup(STATE, 1, 1, 16, "fp32", 1))
    layout, num_states = KVLayout(tuple(groups)), config.num_states or 0
    model = ToyModel(config.max_model_len, windows)
    num_blocks = num_block_ids(config.num_blocks, layout, windows)
    pool = KVPool(layout, num_blocks, num_states=num_states)
    return Engine(config, model, pool, b"toy", Sampler(), proposers)


def make_request(name: str, token_ids: Sequence[int], max_tokens: int = 8, attempt: int = 0, **options) -> Request:
    """Options of Request, those of SamplingParams, and `named=False` to stay out of the prefix cache."""
    named, num_prompt = options.pop("named", True), options.pop("num_prompt_tokens", len(token_ids))
    sampling = SamplingParams(**{k: options.pop(k) for k in list(options) if k in SamplingParams.__dataclass_fields__})
    hashes = tuple(chain_hashes(ROOT, token_ids)) if named else ()
    parent = (hashes[-1] if hashes else ROOT) if named else bytes(32)
    names = dict(span_hashes=hashes, chain_parent=parent)
    return Request(Key(name, attempt), tuple(token_ids), num_prompt, sampling, max_tokens, **names, **options)


def toy_answer(request: Request, window: int = 1 << 30) -> dict[int, tuple[list[int], FinishReason]]:
    """Return the expected answer of every choice, computed without engine, blocks or batches. No penalties."""
    sampler, answers = Sampler(), {}
    for choice in range(request.sampling.n):
        tokens = list(request.token_ids)
        while True:
            num_output = len(tokens) - request.num_prompt_tokens
            banned = request.stop_token_ids if num_output < request.min_tokens else frozenset()
            row = SampleRow(request.sampling, choice, len(tokens), (), (), banned)
            tokens.append(sampler.sample(toy_logits(tokens[-window:]).unsqueeze(0), [row])[0].token_id)
            if tokens[-1] in request.stop_token_ids:
                reason = FinishReason.STOP
                break
            if num_output + 1 >= request.max_tokens:
                reason = FinishReason.LENGTH
                break
        answers[choice] = (tokens[len(request.token_ids) :], reason)
    return answers


@dataclass
class Record:
    """All that came out for one key."""

    tokens: dict[int, list[int]] = field(default_factory=dict)
    reasons: dict[int, FinishReason] = field(default_factory=dict)
    logprobs: dict[int, list] = field(default_factory=dict)
    progress: list[int] = field(default_factory=list)
    first: PrefillDone | None = None
    ended: RequestEnded | None = None

    def answer(self) -> dict[int, tuple[list[int], FinishReason]]:
        return {choice: (tokens, self.reasons[choice]) for choice, tokens in self.tokens.items()}


class Collector(dict):
    """Records by key, checking the order of everything: nothing after the end, one end, no index missed."""

    def __init__(self, first_index: int = 0):
        self.base = first_index

    def __missing__(self, key) -> Record:
        self[key] = Record()
        return self[key]

    def take(self, outputs: list[Output]) -> None:
        for output in outputs:
            record = self[output.key]
            assert record.ended is None, f"{output} after the end"
            match output:
                case RequestEnded():
                    record.ended = output
                case Progress():
                    assert not record.progress or output.upto_token > record.progress[-1]
                    record.progress.append(output.upto_token)
                case PrefillDone():
                    assert record.first is None
                    record.first = output
                    for first in output.first_tokens:
                        self._add(record, first.choice, [first.token_id], [first.logprobs], first.finish_reason)
                case TokenRun():
                    made = len(record.tokens[output.choice]) if output.choice in record.tokens else 0
                    assert output.first_index == self.base + made, "an index missed or repeated"
                    self._add(record, output.choice, output.token_ids, output.logprobs, output.finish_reason)

    def _add(self, record, choice, token_ids, logprobs, reason):
        assert choice not in record.reasons, "a token after the choice finished"
        record.tokens.setdefault(choice, []).extend(token_ids)
        record.logprobs.setdefault(choice, []).extend(entry for entry in logprobs if entry is not None)
        if reason is not None:
            record.reasons[choice] = reason


def run(engine: Engine, requests: Sequence[Request] = (), collector: Collector | None = None) -> Collector:
    """Submits all and steps until nothing is left, checking integrity after every step."""
    records = Collector() if collector is None else collector
    for request in requests:
        engine.submit(request)
    for _ in range(5000):
        if not engine.has_work():
            return records
        records.take(engine.step())
        engine.check_integrity()
    raise AssertionError(f"not done after 5000 steps: {engine.load_report()}")


def random_lives(
    engine: Engine, chance: random.Random, num_turns: int, request_of: Callable[[random.Random, int], Request]
) -> "list[tuple[Request, Record]]":
    """Submit, cancel, park and resume requests, and step, in any order, checking integrity after each turn; then let
    the rest end. Returns those that nobody cancelled, with what they gave out."""
    records, live, cancelled = Collector(), {}, set()
    for index in range(num_turns):
        match chance.choice(("submit", "submit", "step", "step", "step", "cancel", "park", "resume")):
            case "submit":
                request = request_of(chance, index)
                with suppress(Refusal):
                    engine.submit(request)
                    live[request.key] = request
            case "step":
                records.take(engine.step())
            case "cancel" if live:
                key = chance.choice(list(live))
                engine.cancel(key)
                cancelled.add(key)
            case "park" if live:
                engine.admission.park(chance.choice(list(live)))
            case "resume":
                _resume_all(engine)
        engine.check_integrity()
    _resume_all(engine)
    run(engine, collector=records)
    return [(request, records[key]) for key, request in live.items() if key not in cancelled]


def _resume_all(engine: Engine) -> None:
    for key in list(engine.admission.groups):
        engine.admission.resume(key)


def copy_kv(source: Engine, source_refs: Sequence[BlockRef], target: Engine, target_refs: Sequence[BlockRef]) -> None:
    """Copy whole blocks from pool to pool, as a transport does."""
    for ours, theirs in zip(source_refs, target_refs, strict=True):
        target.pool.bytes[theirs.block_id] = source.pool.bytes[ours.block_id]


def hand_over(prefill: Engine, decode: Engine, requests: Sequence[Request]) -> tuple["Collector", "Collector"]:
    """Every prompt is read by one engine and answered by the other: (what the one gave out, what the other did)."""
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
    run(decode, collector=rest)
    run(prefill, collector=firsts)
    return firsts, rest


def check_handed_over(firsts: "Collector", rest: "Collector", request: Request, whole: Record) -> None:
    """The two halves of an answer are that of one engine alone, logprobs bit for bit."""
    for first in firsts[request.key].first.first_tokens:
        made = rest[request.key].tokens.get(first.choice, [])
        assert [first.token_id, *made] == whole.tokens[first.choice]
        if request.sampling.logprobs is not None and made:
            assert [first.logprobs, *rest[request.key].logprobs[first.choice]] == whole.logprobs[first.choice]


def going_on(done: PrefillDone) -> tuple[FirstToken, ...]:
    return tuple(first for first in done.first_tokens if first.finish_reason is None)


class Late(LaunchedTokens):
    def __init__(self, launcher):
        self._launcher = launcher
        self.drawn = None

    def read(self) -> list[int]:
        self._launcher.compute_until(self)
        return self.drawn.tolist()


class LateLauncher(Launcher):
    """Computes a launch when it is read, or when another step must pass."""

    overlaps, allows_multi_step = True, False

    def __init__(self, model, pool):
        super().__init__(model, pool)
        self.waiting: list = []
        self.num_overlapped = 0

    def launch(self, batch, draw, previous, on_layer=None):
        tokens = Late(self)
        self.num_overlapped += bool(self.waiting)
        assert len(self.waiting) < 2, "more than two steps in flight"
        self.waiting.append((tokens, lambda: Launcher.launch(self, batch, draw, previous, on_layer).drawn))
        return tokens

    def compute_until(self, tokens) -> None:
        while tokens.drawn is None:
            self._compute()

    def _compute(self) -> None:
        tokens, compute = self.waiting.pop(0)
        with torch.inference_mode():
            tokens.drawn = compute()

    def wait(self) -> None:
        while self.waiting:
            self._compute()


def launches_of(engine: Engine) -> list[list[tuple[str, int, int]]]:
    """Return the slices of each launch from here on: request, begin, end."""
    launches, launch = [], engine.runner.launch

    def noted(slices, *given):
        launches.append([(seq.group.key.request_id, begin, end) for seq, begin, end in slices])
        return launch(slices, *given)

    engine.runner.launch = noted
    return launches
