"""Describe the sequences of a step for layers with a state."""

import numpy as np
from torch import Tensor

from baton.engine.core.batch import ForwardBatch, SeqSlice
from baton.engine.core.state_spec import StateSpec
from baton.engine.kv.states import StatePool

NUM_NEW, NUM_PENDING, _STATE, _DRAFTS = 1, 3, 5, 6  # columns of `segments`


class StatePlan:
    """Hold one step. `segments`: int64 [S, 7] as `Segment` of native/layers/recurrent.h, for the first layer."""

    def __init__(self, spec: StateSpec, batch: ForwardBatch, states: StatePool):
        self.seqs, self._states, self._spec = batch.seqs, states, spec
        self.num_tokens = len(batch.token_ids)
        rows = [self._row(seq) for seq in batch.seqs]
        self._segments = np.array(rows, np.int64).reshape(-1, 7)
        self._layer_bytes = states.group.block_bytes // states.group.num_layers
        self._draft_bytes = 4 * self._draft_elements * (self._num_draft_rows())

    def segments(self, layer: int) -> np.ndarray:
        """Return the segments of `layer`, counted among those that keep a state."""
        own = self._segments.copy()
        own[:, _STATE] += layer * self._layer_bytes
        own[:, _DRAFTS] += (own[:, _DRAFTS] != 0) * layer * self._draft_bytes
        return own

    def state(self, seq: SeqSlice, layer: int) -> Tensor:
        """Return a layer's state of a sequence, fp32 [elements]."""
        return self._states.of(seq.held_state.state_id)[layer]

    def drafts(self, seq: SeqSlice, layer: int) -> Tensor:
        """Return the inputs of a sequence's proposals in a layer, fp32 [MAX_DRAFT_TOKENS, channels and scalars]."""
        return self._states.drafts_of(seq.held_state.state_id, self._draft_elements)[layer]

    @property
    def _draft_elements(self) -> int:
        return self._spec.conv_size + self._spec.num_scalars

    def _num_draft_rows(self) -> int:
        proposing = next((seq for seq in self.seqs if _proposes(seq)), None)
        return 0 if proposing is None else self.drafts(proposing, 0).shape[0]

    def _row(self, seq: SeqSlice) -> tuple[int, ...]:
        drafts = self.drafts(seq, 0).data_ptr() if _proposes(seq) else 0
        begins = seq.kv_len == seq.query_len
        certain = seq.query_len - seq.held_state.num_drafts
        state = self.state(seq, 0).data_ptr()
        return seq.query_start, seq.query_len, certain, seq.held_state.num_pending, begins, state, drafts


def _proposes(seq: SeqSlice) -> bool:
    return seq.held_state.num_pending + seq.held_state.num_drafts > 0
