"""A smaller model of the same vocabulary proposes, token by token, all sequences in one batch.

It reads tokens only, so none of its state crosses a handoff: it computes its KV of a prompt here, chunk by chunk, with
the tokens that steps leave over, and keeps it in a small pool of its own. Its first pass of a step reads the token that
the target drew last and any others that it lacks; each further pass reads the token that it has just proposed.

It begins to read a sequence at most WINDOW_TOKENS back, as its position 0: an answer does not pay for a long prompt,
and the target's context may be longer than the draft's.
"""

import hashlib
from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor

from baton.engine.core.batch import ForwardBatch, SeqSlice
from baton.engine.core.config import EngineConfig, default_num_blocks
from baton.engine.core.model_spec import ModelSpec
from baton.engine.kv.native import native_pool
from baton.engine.kv.pool import KVPool
from baton.engine.models.decoder import Model
from baton.engine.models.loader import load_model, weight_files
from baton.engine.models.registry import read_spec
from baton.engine.sampling.sampler import Sampler
from baton.engine.speculation.proposers.draft_sampling import draw, is_argmax
from baton.engine.speculation.proposers.native_draft import Passes, UnreadTokens
from baton.engine.speculation.proposers.proposer import Draftee, DraftRequest, MakeLauncher, PassLauncher, Proposer
from baton.protocol import MAX_DRAFT_TOKENS
from kvtransfer.layout import KVLayout

BLOCK_SIZE = 32
WINDOW_TOKENS = 1_024
CHUNK_TOKENS = 128  # the most read ahead in one step, since the sequences of its batch wait for it
LAG_TOKENS = 64  # tokens that a sequence may lack and still be served in this step
USUAL_LACK = 2  # the most tokens that a sequence lacks if it was served in the last step


class Reading:
    """Hold what the draft model has read of a sequence: token_ids[begin:], at its own positions from 0 on."""

    __slots__ = ("begin", "num_computed", "block_ids", "table", "guessed", "guessed_at")

    def __init__(self, begin: int):
        self.begin = begin
        self.num_computed = 0  # positions computed
        self.block_ids: list[int] = []
        self.table: Tensor | None = None  # block_ids as a tensor
        self.guessed: list[int] = []  # its last proposals, after token_ids[:guessed_at]
        self.guessed_at = 0

    def lack(self, token_ids: list[int]) -> int:
        """Return how many tokens it has yet to read, at least one. Guesses that have come true count as read."""
        if self.guessed:
            # KV of the last guess was never computed, and KV of wrong ones is overwritten. The record's last token is
            # always read again, for its logits.
            right = 0
            for guess, token_id in zip(self.guessed[:-1], token_ids[self.guessed_at : -1], strict=False):
                if guess != token_id:
                    break
                right += 1
            self.num_computed = self.guessed_at - self.begin + right
            self.guessed = []
        return len(token_ids) - self.begin - self.num_computed


class DraftModel(Proposer):
    """Propose by a smaller model, as the module describes."""

    name = "draft"

    def __init__(self, model: Model, pool: KVPool, config: EngineConfig, num_weight_bytes: int):
        """Propose by `model` with its own `pool` and `config`; a pass reads at most config.max_num_batched_tokens."""
        self.model, self.pool, self.config = model, pool, config
        self.context = config.max_model_len
        self._launcher: PassLauncher | None = None
        self._free = list(range(pool.num_blocks - 1, -1, -1))
        self._sampler = Sampler()
        fits = Passes.fit(model, model.fused)
        self._passes = Passes(model, model.fused, model.norm.weight, native_pool(pool)) if fits else None
        self._num_bytes = num_weight_bytes + pool.bytes.nbytes

    @property
    def num_bytes(self) -> int:
        return self._num_bytes

    @property
    def num_free_blocks(self) -> int:
        return len(self._free)

    def use_launcher(self, make: MakeLauncher) -> None:
        self._launcher = make(self.model, self.pool, self.config)

    def open(self, draftee: Draftee) -> None:
        draftee.state = self._begin(draftee.token_ids)

    def close(self, draftee: Draftee) -> None:
        self._give_back(draftee.state)
        draftee.state = None

    def num_unread(self, token_ids: Sequence[int], draftee: Draftee | None) -> int:
        if draftee is None:
            num_tokens = min(len(token_ids), WINDOW_TOKENS, self.context // 2)
        else:
            num_tokens = len(token_ids) - draftee.state.begin - draftee.state.num_computed
        return num_tokens if num_tokens > LAG_TOKENS + MAX_DRAFT_TOKENS else 0  # its own guesses may have been wrong

    @torch.inference_mode()
    def prepare(self, draftees: Sequence[Draftee], num_tokens: int) -> int:
        """Read on with at most `num_tokens`, first for the sequence that lacks least: one that is served is better than
        two half read."""
        budget = left = min(num_tokens, CHUNK_TOKENS)
        chunks = []
        for lack, index in sorted((self._lack(draftee), index) for index, draftee in enumerate(draftees)):
            reading = draftees[index].state
            size = min(lack - 1, left)
            if lack > LAG_TOKENS and size > 0 and self._take(reading, reading.num_computed + size):
                chunks.append((draftees[index], size))
                left -= size
        if chunks:
            self._read(chunks, want_logits=False)
        return budget - left

    @torch.inference_mode()
    def propose(self, asks: Sequence[DraftRequest]) -> list[list[int]]:
        drafts: list[list[int]] = [[] for _ in asks]
        width = max(ask.num_tokens for ask in asks)
        served, chunks, left = [], [], self.config.max_num_batched_tokens
        for index, (draftee, _) in enumerate(asks):
            lack, reading = self._lack(draftee), draftee.state
            if lack <= min(LAG_TOKENS, left) and self._take(reading, reading.num_computed + lack + width - 1):
                served.append(index)
                chunks.append((draftee, lack))
                left -= lack
        if not served:
            return drafts
        if self._passes is not None and all(is_argmax(draftee.request) for draftee, _ in chunks):
            counts = [asks[index].num_tokens for index in served]
            for index, draft in zip(served, self._guess(chunks, counts), strict=True):
                drafts[index] = draft
        else:
            self._draw(asks, drafts, served, chunks)
        for (draftee, _), draft in zip(asks, drafts, strict=True):
            draftee.state.guessed, draftee.state.guessed_at = draft, len(draftee.token_ids)
        return drafts

    def _guess(self, chunks: Sequence[tuple[Draftee, int]], counts: Sequence[int]) -> list[list[int]]:
        """Return the most likely tokens of all sequences, in one native call."""
        unread, token_ids = [], []
        for (draftee, lack), count in zip(chunks, counts, strict=True):
            reading = draftee.state
            first = reading.num_computed
            unread.append(UnreadTokens(lack, first + lack, first, count, reading.table.data_ptr()))
            token_ids += draftee.token_ids[reading.begin + first :]
        return self._passes(unread, token_ids)

    def _draw(self, asks: Sequence[DraftRequest], drafts: list[list[int]], served: list[int], chunks: list) -> None:
        """Draw the guesses into `drafts`, one pass per position."""
        logits = self._read(_of_one_width(chunks) if self._launcher else chunks, want_logits=True)
        while True:
            draftees = [asks[index].draftee for index in served]
            drawn = draw(self._sampler, logits, draftees, [drafts[index] for index in served])
            for index, token_id in zip(served, drawn, strict=True):
                drafts[index].append(token_id)
            served = [index for index in served if len(drafts[index]) < asks[index].num_tokens]
            if not served:
                return
            logits = self._read_guesses([(asks[index].draftee.state, drafts[index][-1]) for index in served])

    # ---- what was read ----

    def _begin(self, token_ids: list[int]) -> Reading:
        return Reading(max(0, len(token_ids) - min(WINDOW_TOKENS, self.context // 2)))

    def _lack(self, draftee: Draftee) -> int:
        token_ids = draftee.token_ids
        if len(token_ids) - draftee.state.begin + MAX_DRAFT_TOKENS > self.context:
            self._give_back(draftee.state)
            draftee.state = self._begin(token_ids)
        return draftee.state.lack(token_ids)

    def _take(self, reading: Reading, num_tokens: int) -> bool:
        """Take blocks for `num_tokens` of its positions; return False, so that nothing is proposed, if the pool is
        full."""
        missing = -(-num_tokens // BLOCK_SIZE) - len(reading.block_ids)
        if missing > len(self._free):
            return False
        if missing > 0:
            reading.block_ids += [self._free.pop() for _ in range(missing)]
            reading.table = torch.tensor(reading.block_ids, device="cpu")
        return True

    def _give_back(self, reading: Reading) -> None:
        self._free += reading.block_ids
        reading.block_ids = []

    # ---- passes ----

    def _read(self, chunks: Sequence[tuple[Draftee, int]], want_logits: bool) -> Tensor:
        """Read the next tokens of each sequence, as many as its chunk says; return the logits after the last ones."""
        token_ids: list[int] = []
        positions: list[int] = []
        slots: list[int] = []
        seqs: list[SeqSlice] = []
        for draftee, size in chunks:
            reading = draftee.state
            first = reading.num_computed
            reading.num_computed = end = first + size
            seqs.append(SeqSlice(len(token_ids), size, end, reading.table))
            token_ids += draftee.token_ids[reading.begin + first : reading.begin + end]
            positions += range(first, end)
            slots += [_slot(reading, position) for position in range(first, end)]
        rows = [seq.query_start + seq.query_len - 1 for seq in seqs] if want_logits else []
        if self._launcher and rows and {size for _, size in chunks} == {USUAL_LACK}:  # the graph computes all logits
            return self._forward(token_ids, positions, slots, seqs, list(range(len(token_ids))))[rows]
        return self._forward(token_ids, positions, slots, seqs, rows)

    def _read_guesses(self, guesses: list[tuple[Reading, int]]) -> Tensor:
        """Read one more guess of each sequence, which its record does not hold yet."""
        positions, slots, seqs = [], [], []
        for row, (reading, _) in enumerate(guesses):
            position = reading.num_computed
            reading.num_computed = position + 1
            positions.append(position)
            slots.append(_slot(reading, position))
            seqs.append(SeqSlice(row, 1, position + 1, reading.table))
        return self._forward([token_id for _, token_id in guesses], positions, slots, seqs, list(range(len(guesses))))

    def _forward(self, token_ids, positions, slots, seqs, rows) -> Tensor:
        batch = ForwardBatch(
            token_ids=torch.tensor(token_ids, device="cpu"),
            positions=torch.tensor(positions, device="cpu"),
            slots=torch.tensor(slots, device="cpu"),
            seqs=seqs,
            logit_rows=torch.tensor(rows, dtype=torch.int64, device="cpu"),
        )
        if self._launcher is None:
            return self.model.forward(batch, self.pool)
        return self._launcher.run(batch, False, None)[1]


def _of_one_width(chunks: list[tuple[Draftee, int]]) -> list[tuple[Draftee, int]]:
    """Let all sequences read two tokens where some lack one and others two: a pass of one width runs as a graph."""
    lacks = {lack for _, lack in chunks}
    if lacks != {1, USUAL_LACK} or any(lack == 1 and not draftee.state.num_computed for draftee, lack in chunks):
        return chunks
    for draftee, lack in chunks:
        draftee.state.num_computed -= USUAL_LACK - lack
    return [(draftee, USUAL_LACK) for draftee, _ in chunks]


def _slot(reading: Reading, position: int) -> int:
    return reading.block_ids[position // BLOCK_SIZE] * BLOCK_SIZE + position % BLOCK_SIZE


# ---- from a folder ----


def load(folder: Path, model: Model, config: EngineConfig) -> DraftModel:
    """Return a draft for `model`, which was read from config.model. Raises ModelError or ValueError on a misfit."""
    spec = read_spec(folder)
    check_fit(folder, spec, config.model, model.spec)
    context = min(spec.context, config.max_model_len, 2 * WINDOW_TOKENS)
    num_tokens = CHUNK_TOKENS + USUAL_LACK * config.max_num_seqs
    own = EngineConfig(
        folder, dtype=config.dtype, kv_dtype=config.dtype, block_size=BLOCK_SIZE, max_model_len=context,
        batch_invariant=config.batch_invariant, max_num_seqs=config.max_num_seqs, max_num_batched_tokens=num_tokens,
        cuda_graphs=config.cuda_graphs, sm_share=config.sm_share,
    )  # fmt: skip
    draft = load_model(own, model.device)
    layout = KVLayout((draft.kv_group(own.kv_dtype, own.block_size),))
    pool = KVPool(layout, default_num_blocks(layout, config, context), device=model.device)
    return DraftModel(draft, pool, own, sum(file.stat().st_size for file in weight_files(folder)))


def check_fit(folder: Path, draft: ModelSpec, target_folder: Path, target: ModelSpec) -> None:
    """Raise ValueError, in one line, unless the draft has the target's tokens and is the smaller model."""
    if draft.state is not None:
        raise ValueError(f"draft_model {folder}: its layers keep a state, which drafts do not; give another draft")
    if draft.vocab_size != target.vocab_size:
        raise ValueError(
            f"draft_model {folder}: a vocabulary of {draft.vocab_size}, the model's is {target.vocab_size}; "
            "give a draft with the same tokenizer"
        )
    ours, theirs = (path / "tokenizer.json" for path in (target_folder, folder))
    if ours.is_file() and theirs.is_file() and _digest(ours) != _digest(theirs):
        raise ValueError(f"draft_model {folder}: another tokenizer.json than the model's; give a draft that shares it")
    if (size := num_parameters(draft)) > (limit := num_parameters(target)):
        raise ValueError(
            f"draft_model {folder}: {size / 1e6:.1f} million parameters, the model has {limit / 1e6:.1f}; "
            "a draft must be smaller"
        )


def num_parameters(spec: ModelSpec) -> int:
    """Return the number of parameters in embeddings and projections."""
    return spec.num_layer_weights() + (1 if spec.tied else 2) * spec.vocab_size * spec.hidden_size


def _digest(path: Path) -> bytes:
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").digest()
