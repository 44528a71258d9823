"""An engine over a toy model that shows any block mixed up: its KV is the tokens themselves.

K of a token is (token id, position); the next token's logits are a hash of all tokens as they are read back from
the pool. A block that was shared, copied, evicted or fetched wrongly changes the answer, and a position out of place
raises.
"""

from collections.abc import Sequence
from functools import lru_cache
from pathlib import Path
from types import SimpleNamespace
from typing import NamedTuple

import torch

from baton.engine.core.batch import SeqSlice
from baton.engine.core.config import EngineConfig
from baton.engine.core.request import FinishReason, Key, Request, TokenLogprobs
from baton.engine.engine import Engine
from baton.engine.kv.block_pages import num_block_ids
from baton.engine.kv.pool import KVPool
from baton.engine.sampling.penalties import changes
from baton.engine.sampling.sampler import Sampled, Sampler, sample_row
from baton.sampling_params import SamplingParams
from kvtransfer.layout import STATE, KVGroup, KVLayout
from kvtransfer.naming import SpanHash, chain_hashes

TOY_VOCAB = 97
PRIME = 1_000_003
CHAIN_ROOT = SpanHash(b"root" * 8)


def toy_logits(token_ids: Sequence[int]) -> torch.Tensor:
    """Return logits [TOY_VOCAB] after these tokens: pure."""
    state = len(token_ids)
    for token_id in token_ids:
        state = (state * 31 + token_id + 7) % PRIME
    return _logits_of(state)


@lru_cache(1 << 14)
def _logits_of(state: int) -> torch.Tensor:
    values = (torch.arange(TOY_VOCAB, dtype=torch.int64) * 7919 + 1) * (state + 3) % PRIME
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
            context=max_model_len,
            vocab_size=TOY_VOCAB,
            windows=windows,
            kv_window=kv_window,
            partial_window=partial_window,
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
        found, wanted = torch.zeros(len(batch.token_ids), TOY_VOCAB), batch.logit_rows.tolist()
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
    """Return an engine over a ToyModel. Options of EngineConfig; small by default. `num_states`: its one layer keeps a
    state too. `window`: it sees no further. `windows`: of several layers."""
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


def engine_request(name: str, token_ids: Sequence[int], max_tokens: int = 8, attempt: int = 0, **options) -> Request:
    """Return a request. Options of Request, those of SamplingParams, and `named=False` to stay out of the prefix
    cache."""
    named, num_prompt = options.pop("named", True), options.pop("num_prompt_tokens", len(token_ids))
    sampling = SamplingParams(**{k: options.pop(k) for k in list(options) if k in SamplingParams.__dataclass_fields__})
    hashes = tuple(chain_hashes(CHAIN_ROOT, token_ids)) if named else ()
    parent = (hashes[-1] if hashes else CHAIN_ROOT) if named else bytes(32)
    names = dict(span_hashes=hashes, chain_parent=parent)
    return Request(Key(name, attempt), tuple(token_ids), num_prompt, sampling, max_tokens, **names, **options)


class WholeChoice(NamedTuple):
    """One choice of an undisturbed answer."""

    token_ids: list[int]
    reason: FinishReason
    logprobs: list[TokenLogprobs]


def toy_choices(request: Request, window: int = 1 << 30, max_model_len: int = 1 << 30) -> dict[int, WholeChoice]:
    """Return the expected answer of every choice, computed without engine, blocks or batches."""
    sampler, choices = Sampler(), {}
    for choice in range(request.sampling.n):
        token_ids, logprobs, reason = list(request.token_ids), [], None
        while reason is None:
            drawn = _next(sampler, request, choice, token_ids, window)
            token_ids.append(drawn.token_id)
            if drawn.logprobs is not None:
                logprobs.append(drawn.logprobs)
            if drawn.token_id in request.stop_token_ids:  # which are not drawn before min_tokens
                reason = FinishReason.STOP
            elif len(token_ids) >= min(request.num_prompt_tokens + request.max_tokens, max_model_len):
                reason = FinishReason.LENGTH
        choices[choice] = WholeChoice(token_ids[len(request.token_ids) :], reason, logprobs)
    return choices


def _next(sampler: Sampler, request: Request, choice: int, token_ids: list[int], window: int) -> Sampled:
    row, logits = sample_row(request, request.sampling, choice, token_ids), toy_logits(token_ids[-window:])
    params = row.params
    if not (params.temperature or params.logprobs is not None or changes(params, row.min_tokens_left_bans)):
        return Sampled(int(logits.argmax()), None)
    return sampler.sample(logits.unsqueeze(0), [row])[0]


def toy_answer(request: Request, window: int = 1 << 30) -> dict[int, tuple[list[int], FinishReason]]:
    """Return tokens and end of every expected choice."""
    return {index: (choice.token_ids, choice.reason) for index, choice in toy_choices(request, window).items()}


def toy_prompt(num_tokens: int, seed: int = 1) -> list[int]:
    return [(seed * 7919 + index * index * 31 + index) % TOY_VOCAB for index in range(num_tokens)]
