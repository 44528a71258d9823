"""An EAGLE-style draft (Li et al., arXiv 2401.15077): one decoder layer from a folder of heads, run by
feature_proposer.py. Its features are normed after the layer, which attends to the last WINDOW rows."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor

from baton.engine.attention.base import AttentionShape
from baton.engine.attention.native import NativeAttention
from baton.engine.core.config import EngineConfig
from baton.engine.kv.native import native_pool
from baton.engine.layers.activation import VECTOR_STRIDE
from baton.engine.layers.linear import choose
from baton.engine.layers.linear.base import LinearKernel
from baton.engine.layers.linear.packed import PackedLinear
from baton.engine.layers.norm import RMSNorm
from baton.engine.models.decoder import Model
from baton.engine.models.fused import FusedLayers
from baton.engine.models.layer import Layer
from baton.engine.speculation.proposers.draft_sampling import is_argmax
from baton.engine.speculation.proposers.feature_proposer import (
    Chunk,
    Draft,
    Entry,
    FeatureProposer,
    last_rows,
    slot_tokens,
)
from baton.engine.speculation.proposers.heads_folder import HeadsFolder
from baton.engine.speculation.proposers.native_draft import EntryLayer, Passes, UnreadTokens
from baton.engine.weights.forms import DenseWeight
from kvtransfer.layout import KVGroup, KVLayout


class Eagle(FeatureProposer):
    """Propose by one Llama layer, run by torch or, where all guesses are greedy, in one native call."""

    name = "eagle"

    def __init__(self, model: Model, folder: HeadsFolder, config: EngineConfig):
        spec = model.spec
        make, _ = choose(config.linear, config.batch_invariant, model.dtype, model.device)
        size, self._head_dim = spec.hidden_size, spec.head_dim
        self._q_size, self._kv_size = spec.num_heads * spec.head_dim, spec.num_kv_heads * spec.head_dim
        sizes: list[int] = []

        def read(name: str, *shape: int) -> Tensor:
            tensor = folder.read(name, *shape).to(model.device, model.dtype)
            sizes.append(tensor.nbytes)
            return tensor

        def linear(*parts: Tensor):
            return make(DenseWeight(torch.cat(parts)), None)

        def norm(name: str) -> RMSNorm:
            return RMSNorm(read(f"{name}.weight", size), spec.norm.eps)

        inner = folder.count("intermediate_size")
        padding = -inner % VECTOR_STRIDE
        self._inner = inner + padding
        project = linear(read("project.weight", size, 2 * size))
        embedding_norm, features_norm, self._norm = (norm(name) for name in ("embedding_norm", "features_norm", "norm"))
        qkv = [read(f"{name}_proj.weight", rows, size) for name, rows in self._qkv_sizes.items()]
        gate, up = (F.pad(read(f"mlp.{name}_proj.weight", inner, size), (0, 0, 0, padding)) for name in ("gate", "up"))
        self._layer = Layer(
            norm("input_norm"), linear(*qkv), None, None, linear(read("o_proj.weight", size, self._q_size)),
            norm("mlp_norm"), linear(gate, up), linear(F.pad(read("mlp.down_proj.weight", size, inner), (0, padding))),
        )  # fmt: skip
        group = KVGroup("paged", 1, spec.num_kv_heads, spec.head_dim, config.dtype, slot_tokens())
        entry = Entry(project, embedding_norm, features_norm)
        super().__init__(model, entry, KVLayout((group,)), config.max_num_seqs, sum(sizes))
        self._kv = self._pool.blocks[:, 0]
        self._slots = torch.arange(config.max_num_seqs)
        self._passes = self._native_passes(project, (embedding_norm, features_norm, model.norm))

    @property
    def _qkv_sizes(self) -> dict[str, int]:
        return {"q": self._q_size, "k": self._kv_size, "v": self._kv_size}

    def _native_passes(self, project: LinearKernel, norms: Sequence[RMSNorm]) -> Passes | None:
        """Return the native passes; None if the layer or the target cannot run on the native kernels."""
        model, spec = self.model, self.model.spec
        shape = AttentionShape(
            spec.num_heads, spec.num_kv_heads, spec.head_dim, (self._window,), model.dtype, model.device
        )
        if not isinstance(model.fused, FusedLayers) or NativeAttention.unfit(shape) or spec.differs_from_llama():
            return None
        spec, layers, attention = replace(spec, intermediate_size=self._inner), [self._layer], NativeAttention(shape)
        if FusedLayers.unfit(spec, layers, attention) or not isinstance(project, PackedLinear):
            return None
        fused = FusedLayers(spec, layers, attention, model.ropes)
        if not Passes.fit(model, fused):
            return None
        entry = EntryLayer(project, *(norm.weight for norm in norms))
        return Passes(model, fused, self._norm.weight, native_pool(self._pool), entry)

    def _draw(self, drafts: Sequence[Draft]) -> None:
        if self._passes is not None and all(is_argmax(draft.draftee.request) for draft in drafts):
            self._guess(self._passes, drafts)
        else:
            super()._draw(drafts)

    def _guess(self, passes: Passes, drafts: Sequence[Draft]) -> None:
        """Guess the most likely tokens of all sequences, in one native call."""
        chunks, hidden = self._take_unread([draft.draftee for draft in drafts])
        unread = [
            UnreadTokens(
                len(chunk.token_ids), chunk.end, chunk.position, draft.num_wanted, self._slots.data_ptr() + 8 * chunk.slot
            )
            for chunk, draft in zip(chunks, drafts, strict=True)
        ]  # fmt: skip
        token_ids = [token_id for chunk in chunks for token_id in chunk.token_ids]
        for draft, guessed in zip(drafts, passes(unread, token_ids, hidden), strict=True):
            draft.token_ids.extend(guessed)

    # ---- the layer ----

    def _run_layer(self, x: Tensor, token_ids: Tensor, positions: Tensor, chunks: Sequence[Chunk]) -> Tensor:
        q, k, v = self._rotated(x, positions)
        slots = self._ints([chunk.slot for chunk in chunks for _ in chunk.token_ids])
        places = self._ints([place for chunk in chunks for place in range(chunk.place, chunk.end)])
        self._kv[slots, 0, :, places] = k
        self._kv[slots, 1, :, places] = v
        return self._finish(last_rows(x, chunks), self._attend(last_rows(q, chunks), chunks))

    def _rotated(self, x: Tensor, positions: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Project and rotate x [T, hidden_size] -> q, k, v [T, heads, head_dim]."""
        qkv = self._layer.qkv(self._layer.input_norm(x)).split((self._q_size + self._kv_size, self._kv_size), dim=1)
        qk, v = (part.unflatten(1, (-1, self._head_dim)) for part in qkv)
        cos, sin = self.model.ropes[0].tables(positions, x.dtype)
        q, k = self.model.ropes[0](qk, cos, sin).split((self._q_size // self._head_dim, v.shape[1]), dim=1)
        return q, k, v

    def _attend(self, q: Tensor, chunks: Sequence[Chunk]) -> Tensor:
        """Attend with q [S, num_heads, head_dim], each over the last rows of its slot up to the end of its chunk."""
        window, longest = self._window, max(chunk.end for chunk in chunks)
        if len(chunks) == 1:
            kv = self._kv[chunks[0].slot, :, :, max(0, longest - window) : longest].unsqueeze(0)
            mask = None
        else:
            kv = self._kv[self._ints([chunk.slot for chunk in chunks]), :, :, :longest]
            ends = self._ints([chunk.end for chunk in chunks]).unsqueeze(1)
            places = torch.arange(longest, device=ends.device)
            mask = ((places < ends) & (places >= ends - window)).view(len(chunks), 1, 1, longest)
        queries = q.unflatten(1, (kv.shape[2], -1))  # the heads that share a KV head are rows of one product
        return F.scaled_dot_product_attention(queries, kv[:, 0], kv[:, 1], attn_mask=mask).flatten(1)

    def _finish(self, x: Tensor, mixed: Tensor) -> Tensor:
        """Run the rest of the layer -> features [S, hidden_size]."""
        x = x + self._layer.output(mixed)
        gate, up = self._layer.gate_up(self._layer.mlp_norm(x)).split(self._inner, dim=1)
        return self._norm(x + self._layer.down(F.silu(gate) * up))


def load(folder: Path, model: Model, config: EngineConfig) -> Eagle:
    """Read a folder that `baton train-draft --kind eagle` wrote. Raises ValueError or ModelError (see proposer)."""
    return Eagle(model, HeadsFolder.open(folder, "eagle", model), config)
