"""Score how well a model predicts a text: bits per byte, perplexity, and how often it agrees with another model.

The text takes the engine's own path: prefill chunks in batches, with KV written to a pool in its stored form and read
back, so that the score is that of the served model."""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor
from tqdm import tqdm

from baton.engine.core.batch import FIRST_STATE, ForwardBatch, SeqSlice
from baton.engine.kv.pool import KVPool
from baton.engine.models.decoder import Model
from baton.quantization.core.progress import bar_disabled

CHUNK = 512  # tokens per step
LOGIT_ROWS = 128  # rows whose logits are in memory at a time: half a GB at a vocabulary of a million
BLOCK_SIZE = 32
MAX_WINDOW = 2048  # tokens of context for a prediction


@dataclass(frozen=True)
class Score:
    """The predictions of all tokens except the first of each text."""

    nats: Tensor  # fp64 [num_tokens]: minus the log probability of each token
    choices: Tensor  # int64 [num_tokens]: the most likely token at each position
    num_bytes: int

    @property
    def num_tokens(self) -> int:
        return len(self.nats)

    @property
    def bits_per_byte(self) -> float:
        return self.nats.sum().item() / math.log(2) / self.num_bytes

    @property
    def perplexity(self) -> float:
        return math.exp(self.nats.mean().item())

    def standard_error(self, other: "Score") -> float:
        """Return the standard error of the difference of both scores in bits per byte, paired by token on the same
        text."""
        return (self.nats - other.nats).std().item() * self.num_tokens**0.5 / math.log(2) / self.num_bytes

    def agreement(self, other: "Score") -> float:
        """Return the share of positions at which both would choose the same next token."""
        return (self.choices == other.choices).double().mean().item()


def score(
    model: Model,
    kv_form: str,
    texts: Sequence[list[int]],
    num_bytes: int,
    progress: bool = False,
    pool_type: type[KVPool] = KVPool,
) -> Score:
    """Score a model on `texts`: token ids, each with the tokens before a text; the first token is given, not predicted.
    `num_bytes` is the size of what is predicted; `pool_type` stores KV."""
    window = min(MAX_WINDOW, model.spec.context)
    layout = model.kv_layout(kv_form, BLOCK_SIZE)
    pool = pool_type(layout, -(-window // BLOCK_SIZE), num_states=int(layout.state is not None))
    nats, choices = [], []
    total = sum(len(ids) - 1 for ids in texts)
    with (
        tqdm(total=total, unit="token", desc="score", disable=bar_disabled(progress)) as bar,
        torch.inference_mode(),
    ):
        for ids in texts:
            for begin, first, end in windows(len(ids), window):
                for rows, logits in _Window(model, pool, ids[begin : end - 1]).chunks(first - 1 - begin):
                    targets = torch.tensor([ids[begin + 1 + row] for row in rows])
                    nats.append(F.cross_entropy(logits, targets, reduction="none").double())
                    choices.append(logits.argmax(dim=1))
                    bar.update(len(rows))
    return Score(torch.cat(nats), torch.cat(choices), num_bytes)


def windows(num_tokens: int, length: int) -> Iterator[tuple[int, int, int]]:
    """Yield (begin, first, end): tokens [first, end) are predicted from those from `begin` on, each token except the
    first once. Windows hold `length` inputs and advance by half of that, so only a text's start has less context."""
    first = 1
    while first < num_tokens:
        end = min(num_tokens, max(length + 1, first + length // 2))
        yield max(0, end - length - 1), first, end
        first = end


class _Window:
    """One sequence that owns the whole pool."""

    def __init__(self, model: Model, pool: KVPool, token_ids: list[int]):
        self._model, self._pool, self._ids = model, pool, torch.tensor(token_ids)
        self._block_ids = torch.arange(pool.num_blocks)

    def chunks(self, first_row: int) -> Iterator[tuple[range, Tensor]]:
        """Yield rows from `first_row` on, with their logits fp32 [rows, vocab_size]."""
        for begin in range(0, len(self._ids), CHUNK):
            end = min(begin + CHUNK, len(self._ids))
            hidden = self._step(begin, end)
            for low in range(max(begin, first_row), end, LOGIT_ROWS):
                rows = range(low, min(low + LOGIT_ROWS, end))
                yield rows, self._model.logits(hidden[rows.start - begin : rows.stop - begin])

    def _step(self, begin: int, end: int) -> Tensor:
        # One sequence in consecutive blocks: a token's slot equals its position.
        positions = torch.arange(begin, end)
        state = None if self._pool.states is None else FIRST_STATE
        sequence = SeqSlice(0, end - begin, end, self._block_ids, state)
        batch = ForwardBatch(self._ids[begin:end], positions, positions, [sequence], torch.tensor([end - begin - 1]))
        return self._model.hidden(batch, self._pool)
