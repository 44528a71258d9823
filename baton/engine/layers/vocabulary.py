"""Embedding and output head of a vocabulary that is divided among ranks."""

from collections.abc import Callable

from torch import Tensor

from baton.engine.layers.embedding import PackedEmbedding
from baton.engine.layers.linear import LinearKernel
from baton.engine.parallel.collectives import Collectives


class VocabularyEmbedding:
    """Look up rows of a table divided among ranks: each looks up its own tokens and puts zeros for the others."""

    def __init__(self, table: Callable[[Tensor], Tensor], vocab_size: int, collectives: Collectives):
        """Look up in `table`: that of all tokens, or the part of the head that this rank has packed."""
        self._own, self._collectives = collectives.shard.range_of(vocab_size), collectives
        self._table, self._first = table, 0 if isinstance(table, PackedEmbedding) else self._own.start

    def __call__(self, token_ids: Tensor) -> Tensor:
        """Return the rows of int64 [T] -> [T, hidden_size]."""
        theirs = (token_ids < self._own.start) | (token_ids >= self._own.stop)
        rows = self._table((token_ids - self._own.start).masked_fill(theirs, 0) + self._first)
        return self._collectives.sum(rows.masked_fill(theirs.unsqueeze(1), 0), rows.dtype)

    def of_whole_table(self, token_ids: Tensor) -> Tensor:
        """Return the rows without the other ranks, from a table here that holds all rows, as on a GPU."""
        return self._table(token_ids)


class VocabularyHead:
    """Compute the logits of the whole vocabulary on the first rank, from the parts of all ranks."""

    def __init__(self, own: LinearKernel, vocab_size: int, collectives: Collectives):
        """Hold `own`, this rank's part of the outputs, equally many on every rank."""
        self._own, self._vocab_size, self._collectives = own, vocab_size, collectives
        self.name, self.row_multiple = own.name, own.row_multiple

    def __call__(self, x: Tensor) -> Tensor:
        """Return [R, vocab_size] of x [R, hidden_size]; meaningless on other ranks than the first."""
        own = self._own(x)
        all_ = self._collectives.gather(own, wanted=self._collectives.shard.rank == 0)
        return own if all_ is None else all_.transpose(0, 1).flatten(1)[:, : self._vocab_size]
