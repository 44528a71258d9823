"""Medusa-style heads (Cai et al., arXiv 2401.10774): several tokens guessed from one hidden state, in one pass.

Head i is a residual block before the target's own output matrix, which all of them share, and guesses the token i
places after the one just drawn:

    z = [rms(x) ; rms(e)]                                x: the target's last hidden state, normed
    y = L_i z + V_i silu(W_i z + b_i)                    e: embedding of the token that was drawn from it
    logits_i = head(s_i * rms(y))

That the block sees the drawn token (as in Hydra, arXiv 2402.05109) costs nothing here, since it is known before
anything is proposed. Heads keep no context: what they need is the last decode step's hidden state, from any worker.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from baton.engine.core.config import EngineConfig
from baton.engine.layers.linear import choose
from baton.engine.layers.linear.packed import PackedLinear
from baton.engine.models.decoder import Model
from baton.engine.sampling.sampler import Sampler
from baton.engine.speculation.proposers.draft_sampling import draw, is_argmax
from baton.engine.speculation.proposers.heads_folder import HeadsFolder
from baton.engine.speculation.proposers.native_draft import NativeHeads, Passes
from baton.engine.speculation.proposers.proposer import Advance, DraftRequest, Proposer
from baton.engine.weights.forms import DenseWeight
from baton.protocol import MAX_DRAFT_TOKENS


class Blocks(NamedTuple):
    """The weights of each head."""

    skip: Tensor  # L [num_heads, hidden_size, 2 * hidden_size]
    enter: Tensor  # W, as L
    bias: Tensor  # b [num_heads, hidden_size]
    leave: Tensor  # V [num_heads, hidden_size, hidden_size]
    scales: Tensor  # s [num_heads, hidden_size]


class Medusa(Proposer):
    """Propose by heads, as the module describes; the sequences of a step are rows of one batch."""

    name = "medusa"
    wants_hidden = True

    def __init__(self, model: Model, blocks: Blocks, config: EngineConfig):
        self.model, self._sampler = model, Sampler()
        self.num_heads = len(blocks.scales)
        make, _ = choose(config.linear, config.batch_invariant, model.dtype, model.device)
        skips, enters, biases, leaves, self._scales = (part.to(model.device, model.dtype) for part in blocks)
        self._enter = [
            make(DenseWeight(torch.cat((skip, enter))), torch.cat((torch.zeros_like(bias), bias)))
            for skip, enter, bias in zip(skips, enters, biases, strict=True)
        ]
        self._leave = [make(DenseWeight(leave.contiguous()), None) for leave in leaves]
        self._num_bytes = sum(part.nbytes for part in (skips, enters, biases, biases, leaves, self._scales))
        self._native = self._native_heads()

    def _native_heads(self) -> NativeHeads | None:
        """Return the native heads; None if the heads or the target cannot run on the native kernels."""
        model, linears = self.model, (*self._enter, *self._leave)
        if not (Passes.fit(model, model.fused) and all(isinstance(each, PackedLinear) for each in linears)):
            return None
        return NativeHeads(model, self._enter, self._leave, self._scales)

    @property
    def num_bytes(self) -> int:
        return self._num_bytes

    def propose(self, asks: Sequence[DraftRequest]) -> list[list[int]]:
        drafts: list[list[int]] = [[] for _ in asks]
        known = [index for index, ask in enumerate(asks) if ask.draftee.state is not None]
        if not known:
            return drafts
        draftees = [asks[index].draftee for index in known]
        counts = [min(asks[index].num_tokens, self.num_heads) for index in known]
        hidden = torch.stack([draftee.state for draftee in draftees])
        drawn_ids = [draftee.token_ids[-1] for draftee in draftees]
        if self._native is not None and all(is_argmax(draftee.request) for draftee in draftees):
            for index, count, draft in zip(known, counts, self._native(hidden, drawn_ids, max(counts)), strict=True):
                drafts[index] = draft[:count]
            return drafts
        logits = self._logits(hidden, torch.tensor(drawn_ids, device=self.model.device), max(counts))
        for place in range(max(counts)):
            rows = [row for row, count in enumerate(counts) if count > place]
            some = logits[:, place] if len(rows) == len(known) else logits[rows, place]
            so_far = [drafts[known[row]] for row in rows]
            drawn = draw(self._sampler, some, [draftees[row] for row in rows], so_far)
            for draft, token_id in zip(so_far, drawn, strict=True):
                draft.append(token_id)
        return drafts

    def advance(self, advances: Sequence[Advance], hidden: Tensor | None) -> None:
        """Keep the row of `hidden` [>= rows, hidden_size] that each sequence's last token was drawn from."""
        last = [advance.first_row + advance.num_accepted for advance in advances]
        last_rows = hidden[torch.tensor(last, device=hidden.device)]
        for advance, row in zip(advances, last_rows.unbind(), strict=True):
            advance.draftee.state = row

    def _logits(self, hidden: Tensor, drawn_ids: Tensor, num_heads: int) -> Tensor:
        """Return the logits of the heads: hidden [S, hidden_size], drawn_ids [S] -> fp32 [S, num_heads, vocab_size]."""
        x, drawn = self._norm(self.model.norm(hidden)), self._norm(self.model.embedded(drawn_ids))
        joined, outputs = torch.cat((x, drawn), dim=1), []
        for enter, leave, scale in zip(self._enter[:num_heads], self._leave, self._scales):
            skip, inner = enter(joined).chunk(2, dim=1)
            outputs.append(scale * self._norm(skip + leave(F.silu(inner))))
        return self.model.scored(torch.stack(outputs, dim=1).flatten(0, 1)).float().view(len(hidden), num_heads, -1)

    def _norm(self, x: Tensor) -> Tensor:
        return F.rms_norm(x, x.shape[-1:], eps=self.model.spec.norm.eps)


def load(folder: Path, model: Model, config: EngineConfig) -> Medusa:
    """Read a folder that `baton train-draft --kind medusa` wrote. Raises ValueError or ModelError (see proposer)."""
    found = HeadsFolder.open(folder, "medusa", model)
    num_heads, size = found.count("num_heads"), model.spec.hidden_size
    if num_heads > MAX_DRAFT_TOKENS:
        raise ValueError(f"{folder}: {num_heads} heads, at most {MAX_DRAFT_TOKENS}")

    def stacked(name: str, *shape: int) -> Tensor:
        return torch.stack([found.read(name.format(index), *shape) for index in range(num_heads)])

    blocks = Blocks(
        skip=stacked("skip.{}.weight", size, 2 * size),
        enter=stacked("enter.{}.weight", size, 2 * size),
        bias=stacked("enter.{}.bias", size),
        leave=stacked("leave.{}.weight", size, size),
        scales=stacked("scales.{}", size),
    )
    return Medusa(model, blocks, config)
