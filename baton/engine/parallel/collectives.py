"""Sum and gather among ranks of one host, through memory that all of them map (native/ranks.cpp)."""

import ctypes

import torch
from torch import Tensor

from baton.engine import native
from baton.engine.parallel.shard import Shard

LINE = 64  # bytes
CAPACITY = 1 << 20  # bytes of a rank per turn: those of two ranks fit in the second-level cache
KINDS = {torch.float32: 0, torch.bfloat16: 1}  # as native/vector.h numbers them
LOST, BEAT, WAITED = 0, 8, 16  # byte offsets in the first line, and in a rank's
_POINTER, _INT = ctypes.c_void_p, ctypes.c_int64


class RankLost(RuntimeError):
    """A rank has died or stands still, so the model cannot be computed any more."""


class _Ranks(ctypes.Structure):
    """Mirror `Ranks` of native/ranks.h."""

    _fields_ = [("memory", _POINTER), *((name, _INT) for name in ("rank", "degree", "capacity", "turn", "fast"))]


def num_bytes_for(degree: int) -> int:
    """Return the bytes of memory that so many ranks share, initially zero."""
    return LINE * (1 + degree) + 2 * degree * CAPACITY


class Collectives:
    """Join one rank to the others. All ranks make the same calls in the same order; each waits for the others, and
    raises RankLost if one is lost. Rows of a sum are whole vectors. One thread at a time, except for `beat`, `beat_of`
    and `lose`."""

    shares_memory = True  # ranks write one pool, and native code sums

    def __init__(self, memory: memoryview, shard: Shard, fast: bool = False):
        """Use `memory`, writable, of num_bytes_for(degree); the native library must exist. `fast`: parts of a sum are
        rounded, so that the number of ranks shows in its bits."""
        self.shard, self.fast = shard, fast
        self._words = torch.frombuffer(memory, dtype=torch.int32)
        self._ranks = _Ranks(self._words.data_ptr(), shard.rank, shard.degree, CAPACITY, 0, fast)
        library = native.library()
        assert library is not None
        pointers, returns = [_POINTER] * 2, {"restype": _INT}
        self._sum = library.function(
            "baton_sum_ranks", *pointers, *[_INT] * 3, _POINTER, _INT, _POINTER, _INT, **returns
        )  # fmt: skip
        self._gather = library.function("baton_gather_ranks", *pointers, _INT, _POINTER, **returns)
        self._broadcast = library.function("baton_tell_ranks", *pointers, _INT, **returns)

    @property
    def degree(self) -> int:
        return self.shard.degree

    @property
    def address(self) -> int:
        """Return the address of the struct, for native code that sums."""
        return ctypes.addressof(self._ranks)

    def join(self) -> None:
        """Meet the other ranks before the first sum, once all have their parts of the model."""

    def sum(self, part: Tensor, dtype: torch.dtype, bias: Tensor | None = None) -> Tensor:
        """Add the parts [T, size] of all ranks by the tree, in fp32, then `bias`, fp32 [size]; return [T, size],
        rounded once."""
        part, out = part.contiguous(), torch.empty(part.shape, dtype=dtype)
        added = None if bias is None else bias.data_ptr()
        where = (added, KINDS[dtype], out.data_ptr(), torch.get_num_threads())
        check(self._sum(self.address, part.data_ptr(), KINDS[part.dtype], *part.shape, *where))
        return out

    def gather(self, own: Tensor, wanted: bool = True) -> Tensor | None:
        """Return the values of all ranks, [degree, *own.shape]; None if not wanted here."""
        own = own.contiguous()
        out = own.new_empty(self.shard.degree, *own.shape) if wanted else None
        check(self._gather(self.address, own.data_ptr(), own.nbytes, None if out is None else out.data_ptr()))
        return out

    def broadcast(self, data: Tensor) -> None:
        """Copy the first rank's `data`, contiguous, to that of all others."""
        check(self._broadcast(self.address, data.data_ptr(), data.nbytes))

    def beat(self) -> None:
        """Say that this process runs."""
        self._beat(self.shard.rank).add_(1)

    def beat_of(self, rank: int) -> int:
        """Return how often a rank has called `beat`."""
        return int(self._beat(rank))

    def waited_s(self, rank: int) -> float:
        """Return for how many seconds a rank has waited for the others in all its turns."""
        words = self._words.view(torch.int64)
        return int(words[(LINE * (1 + rank) + WAITED) // 8]) / 1e9

    def lose(self) -> None:
        """Make every wait of every rank end."""
        self._words[LOST // 4] = 1

    def _beat(self, rank: int) -> Tensor:
        return self._words[(LINE * (1 + rank) + BEAT) // 4]


def check(status: int) -> None:
    """Raise RankLost if native code returned that a rank is lost."""
    if status:
        raise RankLost("a rank is lost")
