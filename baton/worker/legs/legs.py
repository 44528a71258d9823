"""Index the live legs of one worker by key, and by the engine's key once another gateway has attached."""

from baton.engine.core.request import Key
from baton.worker.legs.leg import Leg
from baton.worker.legs.states import LegState
from baton.worker.wire.outbox import Outbox


class Legs(dict[Key, Leg]):
    """The live legs by key. Used in the event loop only."""

    def __init__(self) -> None:
        super().__init__()
        self._renamed: dict[Key, Leg] = {}  # by the engine's key

    @property
    def num_busy(self) -> int:
        """Return the number of legs that a gateway waits for."""
        return sum(leg.state is not LegState.ORPHANED for leg in self.values())

    def is_taken(self, key: Key) -> bool:
        """Return whether a live leg has this key, now or in the engine."""
        return key in self or key in self._renamed

    def of_engine(self, key: Key) -> Leg | None:
        return self._renamed.get(key) or self.get(key)

    def of_session(self, outbox: Outbox) -> list[Leg]:
        return [leg for leg in self.values() if leg.outbox is outbox and not leg.is_stream_lost]

    def rename(self, leg: Leg, key: Key) -> None:
        del self[leg.key]
        leg.key = key
        self[key] = self._renamed[leg.engine_key] = leg

    def forget(self, leg: Leg) -> None:
        del self[leg.key]
        self._renamed.pop(leg.engine_key, None)
