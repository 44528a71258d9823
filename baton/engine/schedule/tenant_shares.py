"""Count what the tenants of one engine hold, and bound what each may take more. A lone tenant may have everything. One
with less than its part finds room where others have taken it all, and is owed the blocks that it lacks: sequences of
tenants above their part park for it (scheduler.py)."""

import time
from collections import Counter
from collections.abc import Iterable, Mapping

from baton.engine.core.config import EngineConfig
from baton.engine.core.request import Key, Request
from baton.engine.kv.ledger import Ledger
from baton.engine.kv.window import Window
from baton.engine.schedule.sequence import Group, Sequence
from baton.engine.schedule.states import GroupState
from baton.fairness import has_room
from kvtransfer.layout import KVLayout

_OWED_S = 0.5  # after a refusal; gateways ask again within 20 ms
_SPARE_SHARE = 8  # one in this many blocks, and at most those of one context, is kept for a tenant that may come


def num_blocks(seqs: Iterable[Sequence], window: Window) -> int:
    """That these hold, or have been promised."""
    return sum(seq.num_held(window) + seq.reserve for seq in seqs)


class Shares:
    """Guarded by the ledger's lock."""

    def __init__(self, config: EngineConfig, layout: KVLayout, ledger: Ledger, groups: Mapping[Key, Group]):
        self._ledger, self._groups = ledger, groups
        self._spare = min(layout.num_blocks(config.max_model_len), ledger.num_blocks // _SPARE_SHARE)
        self._owed: dict[bytes, tuple[int, float]] = {}  # tenant -> blocks, until when

    def has_choices(self, request: Request, most: int, num_taken: int) -> bool:
        """Return whether its choices may be admitted beside `num_taken` that are."""
        own = Counter[bytes]()
        if num_taken + request.sampling.n > most:
            for group in self._groups.values():
                if not group.is_held and group.state is not GroupState.PARKED:
                    own[group.tenant] += group.request.sampling.n
        return self._has_room(request, most, num_taken, own, request.sampling.n)

    def has_waiting(self, request: Request, most: int, num_taken: int, num_tokens: int) -> bool:
        """Return whether `num_tokens` of its prompt may wait beside `num_taken` that do."""
        own = Counter[bytes]()
        if num_taken + num_tokens > most:
            for group in self._groups.values():
                if group.num_waiting_tokens:
                    own[group.tenant] += group.num_waiting_tokens
        return self._has_room(request, most, num_taken, own, num_tokens)

    def has_blocks(self, request: Request, num: int) -> bool:
        """Return whether it may take `num` more: a tenant that has its part leaves those that others are owed, and a
        few."""
        tenant = request.tenant_mark
        num_left = sum(owed for other, owed in self.owed().items() if other != tenant) + (self._spare if tenant else 0)
        return not num_left or self._ledger.num_available >= num + num_left or self._is_part(tenant, num)

    def refused(self, request: Request, num: int) -> bool:
        """Note that it lacks `num` blocks, and return whether it is owed them."""
        if not self._is_part(request.tenant_mark, num):
            return False
        self._owed[request.tenant_mark] = num, time.monotonic() + _OWED_S
        return True

    def taken(self, request: Request) -> None:
        """It has what it lacked."""
        self._owed.pop(request.tenant_mark, None)

    @property
    def is_short(self) -> bool:
        """Return whether a tenant may be owed blocks."""
        return bool(self._owed)

    def owed(self) -> dict[bytes, int]:
        """Blocks that tenants lack which have less than their part."""
        if self._owed:
            now = time.monotonic()
            self._owed = {tenant: owed for tenant, owed in self._owed.items() if owed[1] > now}
        return {tenant: num for tenant, (num, _) in self._owed.items()}

    def _has_room(self, request: Request, most: int, num_taken: int, own: Counter[bytes], num: int) -> bool:
        """A tenant that has nothing here may have one request, however large it is."""
        mine = own[request.tenant_mark]
        return not mine or has_room(most, num_taken, mine, num, len(own))

    def _is_part(self, tenant: bytes, num: int) -> bool:
        """Return whether all that it then had would be its part, with one more tenant where it is alone. The first
        request of a tenant is, however large it is. Who has parked all of its requests shares nothing."""
        held = Counter[bytes]()
        for group in self._groups.values():
            if group.state is not GroupState.PARKED:
                held[group.tenant] += num_blocks(group.live, self._ledger.window)
        return not held[tenant] or (held[tenant] + num) * max(2, len(held)) <= self._ledger.num_blocks
