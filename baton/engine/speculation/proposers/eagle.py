"""An EAGLE-style draft (Li et al., arXiv 2401.15077): one decoder layer on the target's hidden states.

    x_p = project([norm(e_p+1) ; norm(f_p)])      e_p+1: embedding of the token after position p
    f_p+1 = norm(layer(x_p, before p))            f_p: the target's last hidden state at p, normed; beyond the last
    logits = head(f_p+1)                          verified position the draft's own output in its place

Embedding and output matrix are the target's. The layer attends to the rows that went before, at most WINDOW of them and
none from before the first decode step on this worker: hidden states do not cross a handoff, so a sequence whose prompt
was read here starts as empty as one whose prompt came from elsewhere.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor

from baton.engine.attention.base import AttentionShape
from baton.engine.attention.native import NativeAttention
from baton.engine.core.config import EngineConfig
from baton.engine.kv.native import native_pool
from baton.engine.kv.pool import KVPool
from baton.engine.layers.activation import VECTOR_STRIDE
from baton.engine.layers.linear import choose
from baton.engine.layers.linear.packed import PackedLinear
from baton.engine.layers.norm import RMSNorm
from baton.engine.models.decoder import Model
from baton.engine.models.fused import FusedLayers
from baton.engine.models.layer import Layer
from baton.engine.sampling.sampler import Sampler
from baton.engine.speculation.proposers.draft_sampling import draw, is_argmax
from baton.engine.speculation.proposers.heads_folder import HeadsFolder
from baton.engine.speculation.proposers.native_draft import EntryLayer, Passes, UnreadTokens
from baton.engine.speculation.proposers.proposer import Advance, Draftee, DraftRequest, Proposer
from baton.engine.weights.forms import DenseWeight
from baton.protocol import MAX_DRAFT_TOKENS
from kvtransfer.layout import KVGroup, KVLayout
from kvtransfer.naming import SPAN_TOKENS

WINDOW = 256  # rows that the layer may look back; a slot has room for twice as many before its last ones move down


@dataclass(slots=True)
class Context:
    """The state kept of one sequence."""

    slot: int
    num_rows: int = 0  # whose K and V are in the slot
    pending: list[tuple[Tensor, int]] = field(default_factory=list)  # rows [n, hidden_size], position of the first

    @property
    def num_pending(self) -> int:
        return sum(len(rows) for rows, _ in self.pending)


class Eagle(Proposer):
    """One slot of K and V per sequence; the sequences of a step are rows of one batch."""

    name = "eagle"
    wants_hidden = True

    def __init__(self, model: Model, folder: HeadsFolder, config: EngineConfig):
        spec = model.spec
        self.model, self._sampler = model, Sampler()
        make, _ = choose(config.linear, config.batch_invariant, model.dtype, model.device)
        size, self._head_dim = spec.hidden_size, spec.head_dim
        self._q_size, self._kv_size = spec.num_heads * spec.head_dim, spec.num_kv_heads * spec.head_dim
        self._weight_bytes = 0

        def read(name: str, *shape: int) -> Tensor:
            tensor = folder.read(name, *shape).to(model.device, model.dtype)
            self._weight_bytes += tensor.numel() * tensor.element_size()
            return tensor

        def linear(*parts: Tensor):
            return make(DenseWeight(torch.cat(parts)), None)

        def norm(name: str) -> RMSNorm:
            return RMSNorm(read(f"{name}.weight", size), spec.norm.eps)

        inner = folder.count("intermediate_size")
        padding = -inner % VECTOR_STRIDE
        self._inner = inner + padding
        self._embedding_norm, self._features_norm, self._norm = (
            norm(name) for name in ("embedding_norm", "features_norm", "norm")
        )
        self._project = linear(read("project.weight", size, 2 * size))
        qkv = [read(f"{name}_proj.weight", rows, size) for name, rows in self._qkv_sizes.items()]
        gate, up = (F.pad(read(f"mlp.{name}_proj.weight", inner, size), (0, 0, 0, padding)) for name in ("gate", "up"))
        self._layer = Layer(
            norm("input_norm"), linear(*qkv), None, None, linear(read("o_proj.weight", size, self._q_size)),
            norm("mlp_norm"), linear(gate, up), linear(F.pad(read("mlp.down_proj.weight", size, inner), (0, padding))),
        )  # fmt: skip
        room = 2 * (WINDOW + MAX_DRAFT_TOKENS + 1)
        room += -room % SPAN_TOKENS
        group = KVGroup("paged", 1, spec.num_kv_heads, spec.head_dim, config.dtype, room)
        self._pool = KVPool(KVLayout((group,)), config.max_num_seqs, device=model.device)  # a block is a slot
        self._kv = self._pool.blocks[:, 0]
        self._free = list(range(config.max_num_seqs))
        self._slots = torch.arange(config.max_num_seqs)
        self._passes = self._native_passes()

    @property
    def _qkv_sizes(self) -> dict[str, int]:
        return {"q": self._q_size, "k": self._kv_size, "v": self._kv_size}

    def _native_passes(self) -> Passes | None:
        """None where the layer or the target cannot be run by the native kernels."""
        model, spec = self.model, self.model.spec
        shape = AttentionShape(spec.num_heads, spec.num_kv_heads, spec.head_dim, (WINDOW,), model.dtype, model.device)
        if not isinstance(model.fused, FusedLayers) or NativeAttention.unfit(shape) or spec.differs_from_llama():
            return None
        spec, layers, attention = replace(spec, intermediate_size=self._inner), [self._layer], NativeAttention(shape)
        if FusedLayers.unfit(spec, layers, attention) or not isinstance(self._project, PackedLinear):
            return None
        fused = FusedLayers(spec, layers, attention, model.ropes)
        if not Passes.fit(model, fused):
            return None
        norms = (self._embedding_norm, self._features_norm, model.norm)
        entry = EntryLayer(self._project, *(norm.weight for norm in norms))
        return Passes(model, fused, self._norm.weight, native_pool(self._pool), entry)

    @property
    def num_bytes(self) -> int:
        rows = self._kv.shape[0] * WINDOW * self.model.spec.hidden_size * self._kv.element_size()
        return self._weight_bytes + self._pool.bytes.nbytes + rows

    def open(self, draftee: Draftee) -> None:
        draftee.state = Context(self._free.pop()) if self._free else None

    def close(self, draftee: Draftee) -> None:
        if draftee.state is not None:
            self._free.append(draftee.state.slot)
            draftee.state = None

    def advance(self, advances: Sequence[Advance], hidden: Tensor | None) -> None:
        """Keep the rows of `hidden` [>= rows, hidden_size] at accepted positions, until the next proposal."""
        index = [row for a in advances for row in range(a.first_row, a.first_row + a.num_accepted + 1)]
        kept = hidden[torch.tensor(index, device=hidden.device)].split(
            [advance.num_accepted + 1 for advance in advances]
        )
        for (draftee, _, num_accepted, _), rows in zip(advances, kept, strict=True):
            context = draftee.state
            if context is None:
                continue
            context.pending.append((rows, len(draftee.token_ids) - num_accepted - 2))
            # Not asked for in a long while: what has left the window is of no use any more.
            while context.num_pending - len(context.pending[0][0]) >= WINDOW:
                del context.pending[0]

    def propose(self, asks: Sequence[DraftRequest]) -> list[list[int]]:
        drafts: list[list[int]] = [[] for _ in asks]
        active = [
            (ask.draftee, draft, min(ask.num_tokens, MAX_DRAFT_TOKENS))
            for ask, draft in zip(asks, drafts, strict=True)
            if ask.draftee.state is not None and (ask.draftee.state.pending)
        ]
        if not active:
            return drafts
        if self._passes is not None and all(is_argmax(draftee.request) for draftee, _, _ in active):
            self._guess(active)
        else:
            self._draw(active)
        return drafts

    def _guess(self, active: Sequence[tuple[Draftee, list[int], int]]) -> None:
        """The likeliest tokens, all in one call."""
        hidden, token_ids, unread = [], [], []
        for draftee, _, count in active:
            context, first = draftee.state, draftee.state.pending[0][1]
            num_new = context.num_pending
            self._make_room(context, num_new)
            context.num_rows += num_new
            unread.append(
                UnreadTokens(num_new, context.num_rows, first, count, self._slots.data_ptr() + 8 * context.slot)
            )
            hidden += [rows for rows, _ in context.pending]
            token_ids += draftee.token_ids[first + 1 : first + 1 + num_new]
            context.pending.clear()
        rows = hidden[0].contiguous() if len(hidden) == 1 else torch.cat(hidden)
        for (_, draft, _), guessed in zip(active, self._passes(unread, token_ids, rows), strict=True):
            draft += guessed

    def _draw(self, active: list[tuple[Draftee, list[int], int]]) -> None:
        """Pass by pass."""
        x, q = self._catch_up([draftee for draftee, _, _ in active])
        while True:
            draftees = [draftee for draftee, _, _ in active]
            lengths = [draftee.state.num_rows + len(draft) for draftee, draft, _ in active]
            features = self._finish(x, self._attend(q, [d.state.slot for d in draftees], lengths))
            logits = self.model.scored(features).float()
            so_far = [draft for _, draft, _ in active]
            for draft, token_id in zip(so_far, draw(self._sampler, logits, draftees, so_far), strict=True):
                draft.append(token_id)
            going_on = [row for row, (_, draft, count) in enumerate(active) if len(draft) < count]
            if not going_on:
                return
            if len(going_on) < len(active):
                active, features = [active[row] for row in going_on], features[going_on]
            x, q = self._next(active, features)

    # ---- rows ----

    def _catch_up(self, draftees: Sequence[Draftee]) -> tuple[Tensor, Tensor]:
        """K and V of all rows that came since the last time; x and q of the last one of each sequence."""
        hidden, token_ids, positions, last_rows = [], [], [], []
        for draftee in draftees:
            for rows, first in draftee.state.pending:
                hidden.append(rows)
                token_ids += draftee.token_ids[first + 1 : first + 1 + len(rows)]
                positions += range(first, first + len(rows))
            last_rows.append(len(positions) - 1)
        x = self._enter(self._ints(token_ids), self.model.norm(torch.cat(hidden)))
        q, k, v = self._rotated(x, self._ints(positions))
        begin = 0
        for draftee, last in zip(draftees, last_rows, strict=True):
            context, num_new = draftee.state, last + 1 - begin
            self._make_room(context, num_new)
            place = slice(context.num_rows, context.num_rows + num_new)
            self._kv[context.slot, 0, :, place] = k[begin : last + 1].transpose(0, 1)
            self._kv[context.slot, 1, :, place] = v[begin : last + 1].transpose(0, 1)
            context.num_rows += num_new
            context.pending.clear()
            begin = last + 1
        return x[last_rows], q[last_rows]

    def _make_room(self, context: Context, num_new: int) -> None:
        """Move the window down in its slot if the slot is full."""
        if context.num_rows + num_new > 2 * WINDOW:
            kept = min(WINDOW, context.num_rows)
            own = self._kv[context.slot]
            own[:, :, :kept] = own[:, :, context.num_rows - kept : context.num_rows].clone()
            context.num_rows = kept

    def _next(self, active: Sequence[tuple[Draftee, list[int], int]], features: Tensor) -> tuple[Tensor, Tensor]:
        """The row after a drafted token: K and V behind the verified ones, where the next catch-up writes over them."""
        x = self._enter(self._ints([draft[-1] for _, draft, _ in active]), features)
        positions = [len(draftee.token_ids) - 2 + len(draft) for draftee, draft, _ in active]
        q, k, v = self._rotated(x, self._ints(positions))
        slots = self._ints([draftee.state.slot for draftee, _, _ in active])
        places = self._ints([draftee.state.num_rows + len(draft) - 1 for draftee, draft, _ in active])
        self._kv[slots, 0, :, places] = k
        self._kv[slots, 1, :, places] = v
        return x, q

    def _ints(self, values: Sequence[int]) -> Tensor:
        return torch.tensor(values, device=self.model.device)

    # ---- the layer ----

    def _enter(self, token_ids: Tensor, features: Tensor) -> Tensor:
        embedded = self._embedding_norm(self.model.embedded(token_ids))
        return self._project(torch.cat((embedded, self._features_norm(features)), dim=1))

    def _rotated(self, x: Tensor, positions: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """x [T, hidden_size] -> q, k, v [T, heads, head_dim]."""
        qkv = self._layer.qkv(self._layer.input_norm(x)).split((self._q_size + self._kv_size, self._kv_size), dim=1)
        qk, v = (part.unflatten(1, (-1, self._head_dim)) for part in qkv)
        cos, sin = self.model.ropes[0].tables(positions, x.dtype)
        q, k = self.model.ropes[0](qk, cos, sin).split((self._q_size // self._head_dim, v.shape[1]), dim=1)
        return q, k, v

    def _attend(self, q: Tensor, slots: Sequence[int], lengths: Sequence[int]) -> Tensor:
        """q [S, num_heads, head_dim], each over the last WINDOW of the first lengths[i] rows of its slot."""
        longest = max(lengths)
        if len(slots) == 1:
            kv = self._kv[slots[0], :, :, max(0, longest - WINDOW) : longest].unsqueeze(0)
            mask = None
        else:
            kv = self._kv[self._ints(slots), :, :, :longest]
            ends = self._ints(lengths).unsqueeze(1)
            places = torch.arange(longest, device=ends.device)
            mask = ((places < ends) & (places >= ends - WINDOW)).view(len(slots), 1, 1, longest)
        queries = q.unflatten(1, (kv.shape[2], -1))  # those that share a KV head are rows of one product
        return F.scaled_dot_product_attention(queries, kv[:, 0], kv[:, 1], attn_mask=mask).flatten(1)

    def _finish(self, x: Tensor, mixed: Tensor) -> Tensor:
        """The rest of the layer -> features [S, hidden_size]."""
        x = x + self._layer.output(mixed)
        gate, up = self._layer.gate_up(self._layer.mlp_norm(x)).split(self._inner, dim=1)
        return self._norm(x + self._layer.down(F.silu(gate) * up))


def load(folder: Path, model: Model, config: EngineConfig) -> Eagle:
    """Read a folder that `baton train-draft --kind eagle` wrote. Raises ValueError or ModelError (see proposer)."""
    return Eagle(model, HeadsFolder.open(folder, "eagle", model), config)
