"""Guess by a layer that continues from its target's last hidden states: one of a folder of heads (eagle.py), or one
that the checkpoint ships (mtp.py).

    x_p = project([norm(e_p+1) ; norm(f_p)])      e_p+1: embedding of the token after position p
    f_p+1 = layer(x_p, before p)                  f_p: the target's last hidden state at p, normed; beyond the last
    logits = head(f_p+1)                          verified position the layer's own output in its place

Embedding and output matrix are the target's. The layer has seen no rows from before the first decode step on this
worker: hidden states do not cross a handoff, so a sequence whose prompt was read here starts as empty as one whose
prompt came from elsewhere.
"""

from abc import abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from typing import NamedTuple

import torch
from torch import Tensor

from baton.engine.kv.pool import KVPool
from baton.engine.models.decoder import Model
from baton.engine.sampling.sampler import Sampler
from baton.engine.speculation.proposers.draft_sampling import draw
from baton.engine.speculation.proposers.proposer import Advance, Draftee, DraftRequest, Proposer
from baton.protocol import MAX_DRAFT_TOKENS
from kvtransfer.layout import KVLayout
from kvtransfer.naming import SPAN_TOKENS

WINDOW = 256  # rows that stay once a slot is full


@dataclass(slots=True)
class Context:
    """Hold the state of one sequence."""

    slot: int
    num_rows: int = 0  # rows whose K and V are in the slot
    # Hidden rows of the target [n, hidden_size], up to the last token but one.
    unread: list[Tensor] = field(default_factory=list)

    @property
    def num_unread(self) -> int:
        return sum(len(rows) for rows in self.unread)


class Draft(NamedTuple):
    """Hold the proposals of one sequence as they grow."""

    draftee: Draftee
    token_ids: list[int]
    num_wanted: int


class Chunk(NamedTuple):
    """Describe consecutive rows of one sequence that the layer reads."""

    slot: int
    place: int  # of the first row, in the slot
    position: int  # of the first row, for the rotation
    token_ids: list[int]  # the token after each row

    @property
    def end(self) -> int:
        """Return how many rows are in the slot after these."""
        return self.place + len(self.token_ids)


class Entry(NamedTuple):
    """Hold the parts before the layer."""

    project: Callable[[Tensor], Tensor]
    embedding_norm: Callable[[Tensor], Tensor]
    features_norm: Callable[[Tensor], Tensor]


class FeatureProposer(Proposer):
    """Propose by a layer that follows hidden states, as the module describes. Each sequence has one slot of K and V;
    the sequences of a step are rows of one batch."""

    wants_hidden = True

    def __init__(self, model: Model, entry: Entry, layout: KVLayout, num_slots: int, weight_bytes: int):
        """Make slots by `layout`, that of the layer's K and V with blocks of `slot_tokens`."""
        self.model, self._entry, self._sampler = model, entry, Sampler()
        self._pool = KVPool(layout, num_slots, device=model.device)  # one block per slot
        self._free = list(range(num_slots))
        self._window, self._weight_bytes = WINDOW, weight_bytes

    @abstractmethod
    def _run_layer(self, x: Tensor, token_ids: Tensor, positions: Tensor, chunks: Sequence[Chunk]) -> Tensor:
        """Pass the rows x [T, hidden_size] of all chunks through the layer and store their K and V; return the features
        [S, hidden_size] of the last row of each chunk."""

    def _logits(self, features: Tensor) -> Tensor:
        return self.model.scored(features).float()

    @property
    def num_bytes(self) -> int:
        hidden = self._pool.num_blocks * self._window * self.model.spec.hidden_size * self.model.dtype.itemsize
        return self._weight_bytes + self._pool.bytes.nbytes + hidden

    def open(self, draftee: Draftee) -> None:
        draftee.state = Context(self._free.pop()) if self._free else None

    def close(self, draftee: Draftee) -> None:
        if draftee.state is not None:
            self._free.append(draftee.state.slot)
            draftee.state = None

    def advance(self, advances: Sequence[Advance], hidden: Tensor | None) -> None:
        """Keep the rows of `hidden` [>= rows, hidden_size] at accepted positions until the next proposal."""
        assert hidden is not None
        index = [row for a in advances for row in range(a.first_row, a.first_row + a.num_accepted + 1)]
        kept = hidden[torch.tensor(index, device=hidden.device)].split([a.num_accepted + 1 for a in advances])
        for advance, rows in zip(advances, kept, strict=True):
            context = advance.draftee.state
            if context is None:
                continue
            context.unread.append(rows)
            # The sequence was not asked for a long time: rows before the window are of no use.
            while context.num_unread - len(context.unread[0]) >= self._window:
                del context.unread[0]

    def propose(self, asks: Sequence[DraftRequest]) -> list[list[int]]:
        drafts = [Draft(ask.draftee, [], min(ask.num_tokens, MAX_DRAFT_TOKENS)) for ask in asks]
        active = [draft for draft in drafts if (context := draft.draftee.state) is not None and context.unread]
        if active:
            self._draw(active)
        return [draft.token_ids for draft in drafts]

    @torch.inference_mode()
    def _draw(self, drafts: Sequence[Draft]) -> None:
        """Draw all that is wanted, pass by pass."""
        chunks, hidden = self._take_unread([draft.draftee for draft in drafts])
        features = self._read(chunks, self.model.normed(hidden))
        while True:
            so_far = [draft.token_ids for draft in drafts]
            drawn = draw(self._sampler, self._logits(features), [draft.draftee for draft in drafts], so_far)
            for token_ids, token_id in zip(so_far, drawn, strict=True):
                token_ids.append(token_id)
            going_on = [row for row, draft in enumerate(drafts) if len(draft.token_ids) < draft.num_wanted]
            if not going_on:
                return
            if len(going_on) < len(drafts):
                drafts, features = [drafts[row] for row in going_on], features[going_on]
            features = self._read([_next_row(draft) for draft in drafts], features)

    def _take_unread(self, draftees: Sequence[Draftee]) -> tuple[list[Chunk], Tensor]:
        """Return the unread rows as chunks, and the target's hidden states [T, hidden_size] at them."""
        chunks, hidden = [], []
        for draftee in draftees:
            context, num_new = draftee.state, draftee.state.num_unread
            if context.num_rows + num_new + MAX_DRAFT_TOKENS > self._pool.block_size:
                self._move_down(context)
            position, token_ids = len(draftee.token_ids) - 1 - num_new, draftee.token_ids[-num_new:]
            chunks.append(Chunk(context.slot, context.num_rows, position, token_ids))
            hidden += context.unread
            context.num_rows += num_new
            context.unread = []
        return chunks, hidden[0].contiguous() if len(hidden) == 1 else torch.cat(hidden)

    def _move_down(self, context: Context) -> None:
        """Make room in a slot by moving its last rows to the front."""
        kept, own = min(self._window, context.num_rows), self._pool.blocks[context.slot, 0]
        own[:, :, :kept] = own[:, :, context.num_rows - kept : context.num_rows].clone()
        context.num_rows = kept

    def _read(self, chunks: Sequence[Chunk], features: Tensor) -> Tensor:
        """Pass rows through the layer, made of `features` [T, hidden_size] and the tokens after them; return the
        features [S, hidden_size] of the last row of each chunk."""
        token_ids = self._ints([token_id for chunk in chunks for token_id in chunk.token_ids])
        positions = self._ints([chunk.position + i for chunk in chunks for i in range(len(chunk.token_ids))])
        embedded = self._entry.embedding_norm(self.model.embedded(token_ids))
        x = self._entry.project(torch.cat((embedded, self._entry.features_norm(features)), dim=1))
        return self._run_layer(x, token_ids, positions, chunks)

    def _ints(self, values: Sequence[int]) -> Tensor:
        return torch.tensor(values, device=self.model.device)


def _next_row(draft: Draft) -> Chunk:
    """Return the row of the last drafted token. Its K and V come after the verified ones and are overwritten by the
    next step."""
    draftee, num_drafted = draft.draftee, len(draft.token_ids)
    context, position = draftee.state, len(draftee.token_ids) + num_drafted - 2
    return Chunk(context.slot, context.num_rows + num_drafted - 1, position, draft.token_ids[-1:])


def last_rows(rows: Tensor, chunks: Sequence[Chunk]) -> Tensor:
    """Return the last row of each chunk out of the rows [T, ...] of all chunks."""
    if len(rows) == len(chunks):
        return rows
    return rows[[end - 1 for end in accumulate(len(chunk.token_ids) for chunk in chunks)]]


def slot_tokens() -> int:
    """Return how many rows a slot has room for: those that stay, as many new ones and a chain of guesses, in whole
    spans."""
    room = 2 * WINDOW + 2 * MAX_DRAFT_TOKENS + 1
    return room + -room % SPAN_TOKENS
