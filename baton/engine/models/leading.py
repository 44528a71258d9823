"""Models of several ranks. The first rank tells the others what to compute before it computes its own part, or passes a
step to later stages in parts; `follow` and `follow_stage` are the other ranks' side."""

import itertools
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from baton.engine.adapters.adapters import Adapter
from baton.engine.adapters.lora_folder import LoraFolder
from baton.engine.core.batch import ForwardBatch
from baton.engine.kv.pool import KVPool
from baton.engine.layers.vocabulary import VocabularyEmbedding
from baton.engine.models.decoder import Model
from baton.engine.parallel.adapters import Files, HeldAdapters, SentAdapters
from baton.engine.parallel.collectives import Collectives
from baton.engine.parallel.commands import CommandKind, broadcast_rows, broadcast_step, receive_command
from baton.engine.parallel.distributed import StageCollectives
from baton.engine.parallel.pipeline import COPY, PUT, PipelineFollower, PipelineLeader
from baton.engine.parallel.stage import micro_batches
from baton.engine.parallel.sums import SumSpeed, copy_bytes_per_s, sum_often
from kvtransfer.layout import KVLayout


class LeadingModel(Model):
    """Lead a model divided among ranks. If a step raises in the middle, no later one is told, since the ranks would be
    at different places."""

    def __init__(self, *arguments):
        super().__init__(*arguments)
        self._sent_to_ranks = SentAdapters()

    def hidden(self, batch: ForwardBatch, pool: KVPool, on_layer: Callable[[int], None] | None = None) -> Tensor:
        with self.all_or_none() as collectives:
            broadcast_step(collectives, batch, self._sent_to_ranks)
            return super().hidden(batch, pool, on_layer)

    def logits(self, hidden: Tensor, out: Tensor | None = None) -> Tensor:
        with self.all_or_none() as collectives:
            broadcast_rows(collectives, CommandKind.LOGITS, hidden)
            return super().logits(hidden, out)

    def embedded(self, token_ids: Tensor) -> Tensor:
        with self.all_or_none() as collectives:
            broadcast_rows(collectives, CommandKind.EMBEDDED, token_ids)
            return super().embedded(token_ids)

    def scored(self, features: Tensor) -> Tensor:
        with self.all_or_none() as collectives:
            broadcast_rows(collectives, CommandKind.SCORED, features)
            return super().scored(features)

    def measure_sums(self, num_tokens: int) -> SumSpeed:
        """Return how fast all ranks add one row, and rows of a step of `num_tokens`."""
        rows = torch.zeros(num_tokens, self.spec.hidden_size, dtype=self.dtype, device=self.device)
        with self.all_or_none() as collectives:
            seconds = []
            for part in (rows[:1], rows):
                broadcast_rows(collectives, CommandKind.SUMMED, part)
                seconds.append(sum_often(collectives, part))
        num_bytes = rows.nbytes if collectives.fast else 4 * rows.numel()
        return SumSpeed(1e6 * seconds[0], num_bytes / seconds[1], copy_bytes_per_s(self.device))

    @contextmanager
    def all_or_none(self) -> Iterator[Collectives]:
        """Tell no later step if what is told within this context does not finish."""
        group = self.group
        try:
            yield group
        except BaseException:
            group.lose()
            raise

    @property
    def group(self) -> Collectives:
        """Return the collectives that join this rank to those that it tells."""
        assert self.collectives is not None
        return self.collectives


class LeadingDeviceModel(LeadingModel):
    """Lead a model divided among GPUs. The launcher (gpu_ranks/launcher.py), which may replay a graph, tells whole
    steps, so what is computed within `in_step` is already told."""

    _in_step = False

    @contextmanager
    def in_step(self) -> Iterator[None]:
        self._in_step = True
        try:
            yield
        finally:
            self._in_step = False

    def hidden(self, batch: ForwardBatch, pool: KVPool, on_layer: Callable[[int], None] | None = None) -> Tensor:
        return Model.hidden(self, batch, pool, on_layer)

    def logits(self, hidden: Tensor, out: Tensor | None = None) -> Tensor:
        return Model.logits(self, hidden, out) if self._in_step else super().logits(hidden, out)

    def embedded(self, token_ids: Tensor) -> Tensor:
        assert isinstance(self.embedding, VocabularyEmbedding)
        return self.embedding.of_whole_table(token_ids)


class FirstDeviceStage(LeadingDeviceModel):
    """Lead a model in stages of one GPU each: a step goes once around, and the rest is computed here."""

    pools_own_layers = True

    def __init__(self, stages: StageCollectives, *arguments):
        self._stages = stages
        super().__init__(*arguments)

    def hidden(self, batch: ForwardBatch, pool: KVPool, on_layer: Callable[[int], None] | None = None) -> Tensor:
        rows = super().hidden(batch, pool, on_layer)[: len(batch.token_ids)].contiguous()
        self._stages.pass_on(rows)
        self._stages.take_in(rows)
        _report_layers(on_layer, range(len(self.kv_of(self.own_layers)), len(self.spec.kv_layers)))
        return rows

    def logits(self, hidden: Tensor, out: Tensor | None = None) -> Tensor:
        return Model.logits(self, hidden, out)

    def embedded(self, token_ids: Tensor) -> Tensor:
        return Model.embedded(self, token_ids)

    def scored(self, features: Tensor) -> Tensor:
        return Model.scored(self, features)

    @property
    def group(self) -> Collectives:
        return self._stages


class NextDeviceStage(Model):
    """Run another stage than the first, which sees no tokens and no logits."""

    pools_own_layers = True

    def __init__(self, stages: StageCollectives, *arguments):
        self._stages = stages
        super().__init__(*arguments)

    def hidden(self, batch: ForwardBatch, pool: KVPool, on_layer: Callable[[int], None] | None = None) -> Tensor:
        rows = torch.empty(len(batch.token_ids), self.spec.hidden_size, dtype=self.dtype, device=self.device)
        self._stages.take_in(rows)
        rows = self.run_layers(rows, batch, pool)[: len(rows)].contiguous()
        self._stages.pass_on(rows)
        return rows

    def logits(self, hidden: Tensor, out: Tensor | None = None) -> Tensor:
        return hidden.new_zeros(len(hidden), 1, dtype=torch.float32)


class StagedStep(NamedTuple):
    """Hold a step on its way through the stages."""

    batch: ForwardBatch
    num_parts: int
    rows: Tensor  # [tokens, hidden_size], changed by the stages


class FirstStage(Model):
    """Run the first of several stages. As many steps as there are stages may be begun and unfinished, one in each
    stage. The rows of a finished step are valid until as many more have been begun."""

    def __init__(self, pipeline: PipelineLeader, *arguments):
        super().__init__(*arguments)
        self.pipeline, self._sent_to_stages = pipeline, SentAdapters()
        self._places = itertools.cycle(range(0, len(pipeline.rows), len(pipeline.rows) // pipeline.degree))

    def hidden(self, batch: ForwardBatch, pool: KVPool, on_layer: Callable[[int], None] | None = None) -> Tensor:
        return self.finish(self.begin(batch, pool), on_layer)

    def begin(self, batch: ForwardBatch, pool: KVPool) -> StagedStep:
        """Compute a step in the layers here, and pass it to the next stage part by part."""
        pipeline, place = self.pipeline, next(self._places)
        parts = micro_batches(batch, pipeline.degree)
        with self._or_lose():
            for key, data in self._sent_to_stages.news(batch):
                pipeline.send_adapter(key, data)
            for number, (first_row, part) in enumerate(parts):
                begin = place + first_row
                rows = pipeline.rows[begin : begin + len(part.token_ids)]
                rows.copy_(super().hidden(part, pool)[: len(rows)])
                pipeline.send(number, begin, self._sent_to_stages.numbered(part))
        return StagedStep(batch, len(parts), pipeline.rows[place : place + len(batch.token_ids)])

    def finish(self, step: StagedStep, on_layer: Callable[[int], None] | None = None) -> Tensor:
        """Wait until the oldest unfinished step has left the last stage; return its rows. `on_layer` as in `hidden`."""
        _report_layers(on_layer, self.kv_of(self.own_layers))
        with self._or_lose():
            for _ in range(step.num_parts):
                self.pipeline.receive()
        _report_layers(on_layer, self.kv_of(range(self.own_layers.stop, self.spec.num_layers)))
        return step.rows

    @contextmanager
    def _or_lose(self) -> Iterator[None]:
        """Compute nothing more if this raises, since the stages are at different places of a step."""
        try:
            yield
        except BaseException:
            self.pipeline.lose()
            raise


class FirstStageOfRanks(FirstStage, LeadingModel):
    """Run the first of several stages with several ranks each: each part of a step is told to this stage's ranks as a
    step."""


class SpreadPool(KVPool):
    """Hold the pool of a worker with stages on other hosts: a block copied here is copied there too."""

    def __init__(self, layout: KVLayout, num_blocks: int, memory: memoryview, leader: PipelineLeader):
        super().__init__(layout, num_blocks, memory)
        self._leader = leader

    def copy_block(self, src: int, dst: int) -> None:
        super().copy_block(src, dst)
        self._leader.copy_block(src, dst)


def _report_layers(on_layer: Callable[[int], None] | None, layers: Sequence[int]) -> None:
    if on_layer is not None:
        for layer in layers:
            on_layer(layer)


def follow_stage(model: Model, follower: PipelineFollower, pool: KVPool) -> None:
    """Run the layers of a stage that is not the first, with its other ranks if it has several, until a rank is lost,
    which raises RankLost."""
    held, sent = HeldAdapters(partial(made_of, model)), SentAdapters()

    def on_message(kind: int, number: int, other: int, data: Tensor) -> None:
        if kind == COPY:
            pool.copy_block(number, other)
        elif kind == PUT:
            pool.put_layers_of_block(number, other, data)
        else:
            held.apply(number, data)

    while True:
        part, rows = follower.receive(on_message)
        part = held.named(part)
        if model.collectives is not None:
            broadcast_step(model.collectives, part, sent, rows)
        rows.copy_(model.run_layers(rows, part, pool)[: len(rows)])
        follower.send(rows)


def follow(model: Model, collectives: Collectives, pool: KVPool) -> None:
    """Compute what the first rank tells, until a rank is lost, which raises RankLost."""
    ask = {
        CommandKind.LOGITS: model.logits,
        CommandKind.EMBEDDED: model.embedded,
        CommandKind.SCORED: model.scored,
        CommandKind.SUMMED: partial(sum_often, collectives),
    }
    held = HeldAdapters(partial(made_of, model))
    while True:
        kind, batch, rows, key = receive_command(collectives, model.spec.hidden_size, model.dtype)
        if batch is not None and rows is not None:
            model.run_layers(rows, held.named(batch), pool)
        elif batch is not None:
            model.hidden(held.named(batch), pool)
        elif kind == CommandKind.ADAPTER and rows is not None:
            held.apply(key, rows)
        else:
            ask[kind](rows)


def made_of(model: Model, files: Files) -> Adapter:
    """Return an adapter for the layers here, made from the files that another rank has sent."""
    return model.make_adapter("", LoraFolder(Path("told by the first rank"), files))
