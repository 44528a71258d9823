"""The layer that a checkpoint ships to predict the token behind the next one (DeepSeek-V3, arXiv 2412.19437, section 2.2).

    x_p = project([norm(e_p+1) ; norm(f_p)])      e_p+1: embedding of the token after position p
    f_p+1 = layer(x_p, before p)                  f_p: the target's last hidden state at p, normed; beyond the last
    logits = head(norm(f_p+1))                    verified position the layer's own output in its place

Embedding and output matrix are the target's. As an EAGLE-style layer it begins empty at the first decode step on this
worker, since hidden states do not cross a handoff, and it looks back at most 2 * WINDOW rows.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from baton.engine.core.batch import ForwardBatch, SeqSlice
from baton.engine.core.config import EngineConfig
from baton.engine.kv.pool import KVPool
from baton.engine.models.decoder import Model
from baton.engine.models.loader import PredictorModules, load_predictor
from baton.engine.sampling.sampler import Sampler
from baton.engine.speculation.proposers.draft_sampling import draw
from baton.engine.speculation.proposers.proposer import Advance, Draftee, DraftRequest, Proposer
from baton.protocol import MAX_DRAFT_TOKENS
from kvtransfer.naming import SPAN_TOKENS

WINDOW = 256  # rows that stay when a slot is full


@dataclass(slots=True)
class Following:
    """The state kept of one sequence."""

    slot: int
    num_rows: int = 0  # whose K and V are in the slot
    rows: list[Tensor] = field(default_factory=list)  # of the target, [n, hidden_size], that it has yet to read

    @property
    def num_unread(self) -> int:
        return sum(len(rows) for rows in self.rows)


class MultiTokenPredictor(Proposer):
    """See the module. One slot of K and V per sequence; the sequences of a step are rows of one batch."""

    name = "mtp"
    wants_hidden = True

    def __init__(self, model: Model, modules: PredictorModules, config: EngineConfig):
        self.model, self._modules, self._sampler = model, modules, Sampler()
        layout = modules.layer.kv_layout(config.dtype, slot_tokens())
        self._pool = KVPool(layout, config.max_num_seqs, device=model.device)  # a block is a slot
        self._free = list(range(config.max_num_seqs))
        self._tables = torch.arange(config.max_num_seqs).unsqueeze(1)

    @property
    def num_bytes(self) -> int:
        hidden = self._pool.num_blocks * WINDOW * self.model.spec.hidden_size * self.model.dtype.itemsize
        return self._modules.layer.weights.num_bytes + self._pool.bytes.nbytes + hidden

    def open(self, draftee: Draftee) -> None:
        draftee.state = Following(self._free.pop()) if self._free else None

    def close(self, draftee: Draftee) -> None:
        if draftee.state is not None:
            self._free.append(draftee.state.slot)
            draftee.state = None

    def advance(self, advances: Sequence[Advance], hidden: Tensor | None) -> None:
        assert hidden is not None
        for draftee, _, num_accepted, first_row in advances:
            if (context := draftee.state) is None:
                continue
            context.rows.append(hidden[first_row : first_row + num_accepted + 1].clone())
            # Not asked for in a long while: what is too old is of no use any more.
            while context.num_unread - len(context.rows[0]) >= WINDOW:
                del context.rows[0]

    @torch.inference_mode()
    def propose(self, asks: Sequence[DraftRequest]) -> list[list[int]]:
        drafts: list[list[int]] = [[] for _ in asks]
        active = [
            (ask.draftee, draft, min(ask.num_tokens, MAX_DRAFT_TOKENS))
            for ask, draft in zip(asks, drafts, strict=True)
            if ask.draftee.state is not None and ask.draftee.state.rows
        ]
        if not active:
            return drafts
        features = self._catch_up([draftee for draftee, _, _ in active])
        while active:
            draftees, so_far = [draftee for draftee, _, _ in active], [draft for _, draft, _ in active]
            logits = self.model.scored(self._modules.norm(features)).float()
            for draft, token_id in zip(so_far, draw(self._sampler, logits, draftees, so_far), strict=True):
                draft.append(token_id)
            going_on = [row for row, (_, draft, count) in enumerate(active) if len(draft) < count]
            active = [active[row] for row in going_on]
            if active:
                features = self._next([(draftee, draft) for draftee, draft, _ in active], features[going_on])
        return drafts

    def _catch_up(self, draftees: Sequence[Draftee]) -> Tensor:
        """Read all rows that came since the last time; what the layer makes of each sequence's last one."""
        chunks, rows = [], []
        for draftee in draftees:
            context, num_new = draftee.state, draftee.state.num_unread
            if context.num_rows + num_new + MAX_DRAFT_TOKENS > self._pool.block_size:
                self._move_down(context)
            token_ids = draftee.token_ids[-num_new:]
            chunks.append((context.slot, context.num_rows, len(draftee.token_ids) - 1 - num_new, token_ids))
            rows += context.rows
            context.rows = []
            context.num_rows += num_new
        found, ends = self._read(chunks, self.model.normed(torch.cat(rows))), []
        for _, _, _, token_ids in chunks:
            ends.append((ends[-1] if ends else -1) + len(token_ids))
        return found[ends]

    def _next(self, drafts: Sequence[tuple[Draftee, list[int]]], features: Tensor) -> Tensor:
        """Read a drafted token of each: its K and V stand behind the verified ones, where the next catch-up writes over
        them."""
        chunks = [
            (draftee.state.slot, draftee.state.num_rows + len(draft) - 1, len(draftee.token_ids) + len(draft) - 2, draft[-1:])
            for draftee, draft in drafts
        ]  # fmt: skip
        return self._read(chunks, features)

    def _move_down(self, context: Following) -> None:
        kept, own = min(WINDOW, context.num_rows), self._pool.blocks[context.slot, 0]
        own[:, :, :kept] = own[:, :, context.num_rows - kept : context.num_rows].clone()
        context.num_rows = kept

    def _read(self, chunks: Sequence[tuple[int, int, int, list[int]]], features: Tensor) -> Tensor:
        """Pass rows through the layer. chunks: slot, place of the first row in it, its position, and the tokens behind
        the rows; features [T, hidden_size] of all of them."""
        modules, size, token_ids, positions, slots, seqs = self._modules, self._pool.block_size, [], [], [], []
        for slot, place, position, own in chunks:
            seqs.append(SeqSlice(len(token_ids), len(own), place + len(own), self._tables[slot]))
            slots += range(slot * size + place, slot * size + place + len(own))
            positions += range(position, position + len(own))
            token_ids += own
        ids, at, places = (torch.tensor(each, device=self.model.device) for each in (token_ids, positions, slots))
        embedded = modules.embedding_norm(self.model.embedded(ids))
        x = modules.project(torch.cat((embedded, modules.features_norm(features)), dim=1))
        batch = ForwardBatch(ids, at, places, seqs, torch.arange(len(ids)))
        return modules.layer.run_layers(x, batch, self._pool)[: len(ids)]


def slot_tokens() -> int:
    """Return how many rows a slot has room for: what stays, as many new ones, a chain of guesses; in whole spans."""
    room = 2 * WINDOW + 2 * MAX_DRAFT_TOKENS + 1
    return room + -room % SPAN_TOKENS


def load(model: Model, config: EngineConfig) -> MultiTokenPredictor:
    """Read the layer from the target's own folder. Raises ValueError where it has none, ModelError for a tensor that is
    missing or differs."""
    if model.spec.predictor is None:
        raise ValueError(
            f"speculator mtp: {model.spec.folder} ships no layer that predicts further tokens; give another one"
        )
    return MultiTokenPredictor(model, load_predictor(model, config, slot_tokens()), config)
