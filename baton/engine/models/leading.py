"""The model of the first of several ranks: what it is asked, it tells the others before it computes its part."""

from collections.abc import Callable

from torch import Tensor

from baton.engine.core.batch import ForwardBatch
from baton.engine.kv.pool import KVPool
from baton.engine.models.decoder import Model
from baton.engine.parallel.collectives import Collectives
from baton.engine.parallel.commands import hear, tell_logits, tell_step


class LeadingModel(Model):
    """See the module. Where a step raises in the middle no later one is told: the ranks would be in different places."""

    def hidden(self, batch: ForwardBatch, pool: KVPool, on_layer: Callable[[int], None] | None = None) -> Tensor:
        assert self.collectives is not None
        tell_step(self.collectives, batch)
        try:
            return super().hidden(batch, pool, on_layer)
        except BaseException:
            self.collectives.lose()
            raise

    def logits(self, hidden: Tensor, out: Tensor | None = None) -> Tensor:
        assert self.collectives is not None
        tell_logits(self.collectives, hidden)
        try:
            return super().logits(hidden, out)
        except BaseException:
            self.collectives.lose()
            raise


def follow(model: Model, collectives: Collectives, pool: KVPool) -> None:
    """Compute what the first rank tells, until a rank is lost: raises RankLost."""
    while True:
        told = hear(collectives, model.spec.hidden_size, model.dtype)
        if isinstance(told, ForwardBatch):
            model.hidden(told, pool)
        else:
            model.logits(told)
