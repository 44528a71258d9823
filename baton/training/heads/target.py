"""The frozen target of a draft's training, read through the engine, so that every family works."""

from __future__ import annotations

from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor

from baton.engine.core.batch import ForwardBatch, SeqSlice, StateRows
from baton.engine.core.config import EngineConfig
from baton.engine.core.device import product_dtype
from baton.engine.engine import Engine
from baton.engine.models.registry import read_spec

BLOCK_SIZE = 32


class FrozenTarget:
    """The fixed part while a draft learns: hidden states of a text, the embedding and the output matrix."""

    def __init__(self, folder: Path, max_length: int, max_tokens: int) -> None:
        """Load the target. `max_length`: tokens of the longest window; `max_tokens`: of the largest batch. Raises
        ModelError that names the invalid file."""
        num_seqs = max_tokens // max_length
        num_blocks = num_seqs * -(-max_length // BLOCK_SIZE)
        num_states = None if read_spec(folder).state is None else max(2, num_seqs)
        # Exact bits do not matter here, so the fast kernels are used.
        config = EngineConfig(
            folder,
            block_size=BLOCK_SIZE,
            num_blocks=num_blocks,
            num_states=num_states,
            max_model_len=max_length,
            batch_invariant=False,
            device="cpu",
        )
        engine = Engine.load(config)
        self.model, self._pool = engine.runner.model, engine.pool
        self.identity = engine.model_identity
        self.spec = self.model.spec
        with torch.no_grad():
            # The matrix in whatever form it is stored: its columns are the products with unit vectors.
            columns = self.model.head(torch.eye(self.spec.hidden_size, dtype=self.model.dtype))
            self.head = columns.t().contiguous().to(product_dtype())

    @property
    def feature_scale(self) -> float:
        """The root mean square of the features."""
        return self.model.norm.weight.float().square().mean().sqrt().item()

    @torch.no_grad()
    def features(self, token_ids: Tensor) -> Tensor:
        """Return the inputs of the output matrix [batch, length, hidden_size] for token ids [batch, length]."""
        num_seqs, length = token_ids.shape
        num_blocks = -(-length // BLOCK_SIZE)
        tables = torch.arange(num_seqs * num_blocks).view(num_seqs, num_blocks)
        positions = torch.arange(length)
        states = [None if self._pool.states is None else StateRows(index) for index in range(num_seqs)]
        batch = ForwardBatch(
            token_ids=token_ids.reshape(-1),
            positions=positions.repeat(num_seqs),
            slots=(tables[:, positions // BLOCK_SIZE] * BLOCK_SIZE + positions % BLOCK_SIZE).view(-1),
            seqs=[
                SeqSlice(index * length, length, length, table, state)
                for index, (table, state) in enumerate(zip(tables, states, strict=True))
            ],
            logit_rows=torch.empty(0, dtype=torch.int64),
        )
        rows = self.model.hidden(batch, self._pool)[: token_ids.numel()]
        return self.model.norm(rows).view(num_seqs, length, -1)

    @torch.no_grad()
    def embed(self, token_ids: Tensor) -> Tensor:
        """Return the embeddings [..., hidden_size] of token ids int64 [...]."""
        return self.model.embedding(token_ids.reshape(-1)).view(*token_ids.shape, -1)

    def logits(self, features: Tensor) -> Tensor:
        """Return the logits [..., vocab_size] of features [..., hidden_size], scaled and capped like the model's;
        gradients flow to the features."""
        logits = F.linear(features.to(self.head.dtype), self.head)
        if self.spec.logit_scale != 1:
            logits = logits * self.spec.logit_scale
        if (cap := self.spec.logit_softcap) is not None:  # in fp32, since large logits near the cap differ by little
            logits = torch.tanh(logits.float() / cap) * cap
        return logits

    @torch.no_grad()
    def distribution(self, features: Tensor) -> Tensor:
        """Return the target's distribution of the next token, fp32 [..., vocab_size]."""
        return self.logits(features).float().softmax(dim=-1)
