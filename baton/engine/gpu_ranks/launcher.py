"""Launch one step on the GPUs of all ranks. The first rank tells the others what its own launcher gets, from
the host, and they do the same, graphs included. Tokens that it draws go to the others' devices without passing
through the host."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial

import torch
from torch import Tensor

from baton.engine.core.batch import ForwardBatch
from baton.engine.execute.launcher import Draw, GpuLauncher, LaunchedTokens
from baton.engine.kv.pool import KVPool
from baton.engine.models.decoder import Model
from baton.engine.models.leading import LeadingDeviceModel, made_of
from baton.engine.parallel.adapters import HeldAdapters, SentAdapters
from baton.engine.parallel.commands import CommandKind, broadcast_rows, broadcast_step, receive_command
from baton.engine.parallel.distributed import DistributedCollectives
from baton.engine.parallel.sums import sum_often


class LeadingPool(KVPool):
    """Hold the first rank's pool, of its heads or layers: a block copied here is copied in all ranks' pools."""

    def lead(self, model: LeadingDeviceModel) -> None:
        self._model, self.num_layers = model, len(model.spec.kv_layers)

    def copy_block(self, src: int, dst: int) -> None:
        with self._model.all_or_none() as collectives:
            broadcast_rows(collectives, CommandKind.COPY, torch.tensor((src, dst)))
            super().copy_block(src, dst)


class LeadingLauncher(GpuLauncher):
    """Launch as the first rank. A step that raises in its middle is the last one, since ranks would be at different
    places."""

    model: LeadingDeviceModel

    def __init__(self, *arguments):
        self._sent = SentAdapters()
        super().__init__(*arguments)

    @property
    def summary(self) -> str:
        assert isinstance(self.model.group, DistributedCollectives)
        return f"{super().summary}, {self.model.group.summary}"

    def run(
        self,
        batch: ForwardBatch,
        keeps_hidden: bool,
        on_layer: Callable[[int], None] | None,
        on_hidden: Callable[[Tensor], None] | None = None,
    ) -> tuple[Tensor | None, Tensor]:
        with self._step(batch, CommandKind.STEP if on_hidden is None else CommandKind.READ):
            return super().run(batch, keeps_hidden, on_layer, on_hidden)

    def launch(
        self,
        batch: ForwardBatch,
        draw: Draw,
        previous: LaunchedTokens | None,
        on_layer: Callable[[int], None] | None = None,
    ) -> LaunchedTokens:
        def draw_for_all(logits: Tensor) -> Tensor:
            drawn = draw(logits)
            if len(drawn):
                collectives.send(drawn)
            return drawn

        with self._step(batch, CommandKind.LAUNCH if previous is None else CommandKind.CONTINUE) as collectives:
            return super().launch(batch, draw_for_all, previous, on_layer)

    @contextmanager
    def _step(self, batch: ForwardBatch, kind: CommandKind) -> Iterator[DistributedCollectives]:
        with self.model.all_or_none() as collectives, self.model.in_step():
            assert isinstance(collectives, DistributedCollectives)
            broadcast_step(collectives, batch, self._sent, kind=kind)
            yield collectives


def follow_launches(launcher: GpuLauncher, collectives: DistributedCollectives) -> None:
    """Launch what the first rank tells, until a rank is lost, which raises RankLost."""
    model, pool, held = launcher.model, launcher.pool, HeldAdapters(partial(made_of, launcher.model))
    ask = _answers(model, pool, collectives)
    last: LaunchedTokens | None = None
    while True:
        kind, batch, rows, key = receive_command(collectives, model.spec.hidden_size, model.dtype)
        if batch is None:
            if kind == CommandKind.ADAPTER:
                held.apply(key, rows)
            else:
                ask[kind](rows)
            continue
        batch = held.named(batch)
        if kind in (CommandKind.LAUNCH, CommandKind.CONTINUE):
            receive = partial(_receive, collectives, len(batch.logit_rows))
            launched = launcher.launch(batch, receive, last if kind == CommandKind.CONTINUE else None)
            if last is not None:
                last.read()  # the next step reuses its inputs' place on the host
            last = launched
        else:
            launcher.run(batch, False, None, None if kind == CommandKind.STEP else lambda hidden: None)
            launcher.wait()
            last = None


def _receive(collectives: DistributedCollectives, count: int, logits: Tensor) -> Tensor:
    drawn = torch.empty(count, dtype=torch.int64, device=logits.device)
    if count:
        collectives.send(drawn)
    return drawn


def _answers(
    model: Model, pool: KVPool, collectives: DistributedCollectives
) -> dict[CommandKind, Callable[[Tensor], object]]:
    """Return the handlers of commands that are not steps; rows arrive on the host."""

    def on_device(ask: Callable[[Tensor], object]) -> Callable[[Tensor], object]:
        return lambda rows: ask(rows.to(model.device))

    return {
        CommandKind.LOGITS: on_device(model.logits),
        CommandKind.SCORED: on_device(model.scored),
        CommandKind.SUMMED: on_device(partial(sum_often, collectives)),
        CommandKind.COPY: lambda blocks: pool.copy_block(*blocks.tolist()),
    }
