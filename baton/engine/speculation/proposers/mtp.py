"""The layer that a checkpoint ships to predict the token after the next one (DeepSeek-V3, arXiv 2412.19437, section
2.2), run by feature_proposer.py. Its features are normed before the head only. It attends to all rows in its slot."""

from collections.abc import Sequence

import torch
from torch import Tensor

from baton.engine.core.batch import ForwardBatch, SeqSlice
from baton.engine.core.config import EngineConfig
from baton.engine.models.decoder import Model
from baton.engine.models.loader import PredictorModules, load_predictor
from baton.engine.speculation.proposers.feature_proposer import Chunk, Entry, FeatureProposer, last_rows, slot_tokens


class MultiTokenPredictor(FeatureProposer):
    """Propose by one decoder layer of the target's own kind."""

    name = "mtp"

    def __init__(self, model: Model, modules: PredictorModules, config: EngineConfig):
        entry = Entry(modules.project, modules.embedding_norm, modules.features_norm)
        layout, weight_bytes = modules.layer.kv_layout(config.dtype, slot_tokens()), modules.layer.weights.num_bytes
        super().__init__(model, entry, layout, config.max_num_seqs, weight_bytes)
        self._layer, self._norm = modules.layer, modules.norm
        self._tables = torch.arange(config.max_num_seqs).unsqueeze(1)

    def _run_layer(self, x: Tensor, token_ids: Tensor, positions: Tensor, chunks: Sequence[Chunk]) -> Tensor:
        size, places, seqs = self._pool.block_size, [], []
        for slot, place, _, own in chunks:
            seqs.append(SeqSlice(len(places), len(own), place + len(own), self._tables[slot]))
            places += range(slot * size + place, slot * size + place + len(own))
        batch = ForwardBatch(token_ids, positions, self._ints(places), seqs, torch.arange(len(places)))
        return last_rows(self._layer.run_layers(x, batch, self._pool)[: len(places)], chunks)

    def _logits(self, features: Tensor) -> Tensor:
        return super()._logits(self._norm(features))


def load(model: Model, config: EngineConfig) -> MultiTokenPredictor:
    """Read the layer from the target's folder. Raises ValueError if the folder has none, ModelError for a tensor that
    is missing or does not fit."""
    if model.spec.predictor is None:
        raise ValueError(
            f"speculator mtp: {model.spec.folder} ships no layer that predicts further tokens; give another one"
        )
    return MultiTokenPredictor(model, load_predictor(model, config, slot_tokens()), config)
