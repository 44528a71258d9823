"""Feed sequences to Model.forward step by step, in batches that a test puts together."""

import torch

from baton.engine.core.batch import ForwardBatch, SeqSlice, StateRows
from baton.engine.kv.pool import KVPool
from baton.engine.models.decoder import Model


class ManualBatch:
    """Sequences in a paged pool, their blocks scattered, stepped in whatever mixture the test asks for."""

    def __init__(self, model: Model, form: str = "fp32", block_size: int = 16, num_blocks: int = 400):
        self.model = model
        layout = model.kv_layout(form, block_size)
        num_states = 8 if layout.state is not None else 0
        self.pool = KVPool(layout, num_blocks, device=model.device, num_states=num_states)
        # What a block held before must not matter.
        self.pool.bytes.fill_(255)  # NaN in every form, or in its scales
        if self.pool.states is not None:
            for state_id in range(num_states):
                self.pool.states.of(state_id).fill_(float("nan"))
        self._free = torch.randperm(num_blocks, generator=torch.Generator().manual_seed(1)).tolist()
        self.block_ids: dict[str, list[int]] = {}
        self.num_tokens: dict[str, int] = {}

    def states(self) -> list[bytes]:
        """Return what layers keep of each sequence that has been stepped, without the padding of a layer's block."""
        if self.pool.states is None:
            return []
        kept = range(len(self.block_ids))
        size = self.model.spec.state.num_elements
        return [self.pool.states.of(state_id)[:, :size].numpy().tobytes() for state_id in kept]

    def step(self, work: dict[str, list[int]]) -> dict[str, torch.Tensor]:
        """Append tokens to sequences, all in one batch; logits of all of their rows, per sequence."""
        token_ids, positions, slots, seqs = [], [], [], []
        size = self.pool.block_size
        for name, new_ids in work.items():
            begin = self.num_tokens.get(name, 0)
            end = begin + len(new_ids)
            blocks = self.block_ids.setdefault(name, [])
            while len(blocks) * size < end:
                blocks.append(self._free.pop())
            state = StateRows(list(self.block_ids).index(name)) if self.pool.states is not None else None
            seqs.append(SeqSlice(len(token_ids), len(new_ids), end, torch.tensor(blocks), state))
            token_ids += new_ids
            positions += range(begin, end)
            slots += [blocks[position // size] * size + position % size for position in range(begin, end)]
            self.num_tokens[name] = end
        rows = torch.arange(len(token_ids))
        batch = ForwardBatch(torch.tensor(token_ids), torch.tensor(positions), torch.tensor(slots), seqs, rows)
        with torch.inference_mode():
            logits = self.model.forward(batch, self.pool)
        return dict(zip(work, logits.split([seq.query_len for seq in seqs]), strict=True))
