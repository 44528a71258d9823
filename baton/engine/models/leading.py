"""The model of the first of several ranks: what it is asked, it tells the others before it computes its part."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from torch import Tensor

from baton.engine.core.batch import ForwardBatch
from baton.engine.kv.pool import KVPool
from baton.engine.models.decoder import Model
from baton.engine.parallel.collectives import Collectives
from baton.engine.parallel.commands import CommandKind, hear, tell_rows, tell_step


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


def follow(model: Model, collectives: Collectives, pool: KVPool) -> None:
    """Compute what the first rank tells, until a rank is lost: raises RankLost."""
    ask = {CommandKind.LOGITS: model.logits, CommandKind.EMBEDDED: model.embedded, CommandKind.SCORED: model.scored}
    while True:
        kind, told = hear(collectives, model.spec.hidden_size, model.dtype)
        if isinstance(told, ForwardBatch):
            model.hidden(told, pool)
        else:
            ask[kind](told)
