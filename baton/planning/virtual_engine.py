"""An engine in virtual time: Baton's scheduler, admission, ledger and prefix cache over a model that computes nothing
and only says how long it would take."""

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, NamedTuple

import torch

from baton.engine.core.batch import ForwardBatch
from baton.engine.core.config import EngineConfig
from baton.engine.core.model_spec import ModelSpec
from baton.engine.engine import Engine
from baton.engine.execute.launcher import Launcher
from baton.engine.kv.pool import KVPool
from baton.engine.sampling.sampler import Sampler
from kvtransfer.layout import KVGroup, KVLayout

_NUM_LOGITS = 8


class StepPieces(NamedTuple):
    """What a step computes: for each sequence (tokens, KV tokens that its last token sees), and the rows of logits."""

    pieces: tuple[tuple[int, int], ...]
    num_rows: int


class VirtualLauncher(Launcher):
    """A launcher that computes nothing; `step_s` is what the last step would have taken."""

    allows_multi_step = False

    def __init__(self, model: Any, pool: KVPool, step_s: Callable[[StepPieces], float]):
        super().__init__(model, pool)
        self._step_s, self.step_s = step_s, 0.0
        self._made_logits = torch.zeros(1, _NUM_LOGITS)

    def run(
        self, batch: ForwardBatch, keeps_hidden: bool, on_layer: Any = None, on_hidden: Any = None
    ) -> tuple[None, torch.Tensor]:
        num_rows = len(batch.logit_rows)
        self.step_s = self._step_s(StepPieces(tuple((seq.query_len, seq.kv_len) for seq in batch.seqs), num_rows))
        return None, self._made_logits.expand(num_rows, _NUM_LOGITS)


def virtual_engine(spec: ModelSpec, config: EngineConfig, step_s: Callable[[StepPieces], float]) -> Engine:
    """Return an engine whose steps take the time that `step_s` says. `config` is resolved; the pool takes a byte or two
    per token."""
    layout = KVLayout((KVGroup("paged", 1, 1, 1, "fp8_e4m3", config.block_size),))
    assert config.num_blocks is not None, "the config is resolved"
    pool = KVPool(layout, config.num_blocks)
    model: Any = SimpleNamespace(spec=spec, attention=SimpleNamespace(name="none"), fused=None)
    launcher = VirtualLauncher(model, pool, step_s)
    return Engine(config, model, pool, b"", Sampler(), (), launcher)
