"""The model of the first of several ranks: what it is asked, it tells the others before it computes its part, or it gives
them a step in parts behind its own layers; and what the others do with that."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from torch import Tensor

from baton.engine.core.batch import ForwardBatch
from baton.engine.kv.pool import KVPool
from baton.engine.models.decoder import Model
from baton.engine.parallel.collectives import Collectives
from baton.engine.parallel.commands import CommandKind, hear, tell_rows, tell_step
from baton.engine.parallel.pipeline import PipelineFollower, PipelineLeader
from baton.engine.parallel.stage import micro_batches
from kvtransfer.layout import KVLayout


class LeadingModel(Model):
    """See the module. Where a step raises in the middle no later one is told: the ranks would be in different places."""

    def hidden(self, batch: ForwardBatch, pool: KVPool, on_layer: Callable[[int], None] | None = None) -> Tensor:
        with self._all_or_none() as collectives:
            tell_step(collectives, batch)
            return super().hidden(batch, pool, on_layer)

    def logits(self, hidden: Tensor, out: Tensor | None = None) -> Tensor:
        with self._all_or_none() as collectives:
            tell_rows(collectives, CommandKind.LOGITS, hidden)
            return super().logits(hidden, out)

    def embedded(self, token_ids: Tensor) -> Tensor:
        with self._all_or_none() as collectives:
            tell_rows(collectives, CommandKind.EMBEDDED, token_ids)
            return super().embedded(token_ids)

    def scored(self, features: Tensor) -> Tensor:
        with self._all_or_none() as collectives:
            tell_rows(collectives, CommandKind.SCORED, features)
            return super().scored(features)

    @contextmanager
    def _all_or_none(self) -> Iterator[Collectives]:
        assert self.collectives is not None
        try:
            yield self.collectives
        except BaseException:
            self.collectives.lose()
            raise


class FirstStage(Model):
    """The model of the first of several stages. `hidden` returns rows that the next step overwrites."""

    def __init__(self, pipeline: PipelineLeader, *arguments):
        super().__init__(*arguments)
        self.pipeline = pipeline

    def hidden(self, batch: ForwardBatch, pool: KVPool, on_layer: Callable[[int], None] | None = None) -> Tensor:
        pipeline = self.pipeline
        try:
            parts = micro_batches(batch, pipeline.degree)
            for number, (first_row, part) in enumerate(parts):
                rows = pipeline.rows[first_row : first_row + len(part.token_ids)]
                rows.copy_(self.run_layers(self._embed(part.token_ids), part, pool)[: len(rows)])
                pipeline.send(number, first_row, part)
            _tell(on_layer, self.own_layers)
            for _ in parts:
                pipeline.receive()
        except BaseException:  # the stages are in different places of the step
            pipeline.lose()
            raise
        _tell(on_layer, range(self.own_layers.stop, self.spec.num_layers))
        return pipeline.rows[: len(batch.token_ids)]


class SpreadPool(KVPool):
    """The pool of a worker some of whose stages have theirs on other hosts: what is copied here is copied there."""

    def __init__(self, layout: KVLayout, num_blocks: int, memory: memoryview, leader: PipelineLeader):
        super().__init__(layout, num_blocks, memory)
        self._leader = leader

    def copy_block(self, src: int, dst: int) -> None:
        super().copy_block(src, dst)
        self._leader.copy_block(src, dst)


def _tell(on_layer: Callable[[int], None] | None, layers: range) -> None:
    if on_layer is not None:
        for layer in layers:
            on_layer(layer)


def follow_stage(model: Model, follower: PipelineFollower, pool: KVPool) -> None:
    """Put rows through the layers of a stage that is not the first, until a rank is lost: raises RankLost."""
    while True:
        part, rows = follower.receive(pool.copy_block)
        rows.copy_(model.run_layers(rows, part, pool)[: len(rows)])
        follower.send(rows)


def follow(model: Model, collectives: Collectives, pool: KVPool) -> None:
    """Compute what the first rank tells, until a rank is lost: raises RankLost."""
    ask = {CommandKind.LOGITS: model.logits, CommandKind.EMBEDDED: model.embedded, CommandKind.SCORED: model.scored}
    while True:
        kind, told = hear(collectives, model.spec.hidden_size, model.dtype)
        if isinstance(told, ForwardBatch):
            model.hidden(told, pool)
        else:
            ask[kind](told)
