"""A connection that has accidents: named faults at named frames, on either side of a dialogue."""

import asyncio
import random
from dataclasses import dataclass, field

import numpy as np

from tests.support.kvtransfer.rig import InterceptedConnection, kind

FAULTS = ("drop", "delay", "corrupt", "truncate", "twice", "reorder", "kill")
POINTS = ("want", "ready", "ack", "confirm", "end")
DELAY_S = 0.05


@dataclass
class Accidents:
    """Let `fault` meet the `nth` frame of kind `point` that goes out on any connection that shares it; `every`:
    then each n-th further one, too."""

    fault: str
    point: str
    nth: int = 0
    every: int = 0
    seed: int = 0
    seen: int = 0
    done: list[str] = field(default_factory=list)

    def hits(self, frame) -> bool:
        if kind(frame) != self.point:
            return False
        self.seen += 1
        late = self.seen - 1 - self.nth
        hit = late == 0 or (self.every > 0 and late > 0 and late % self.every == 0)
        if hit:
            self.done.append(self.fault)
        return hit


class AccidentConnection(InterceptedConnection):
    """What is sent through it meets `accidents`, the bytes behind frames too."""

    def __init__(self, connection, accidents: Accidents):
        super().__init__(connection, None)
        self._accidents = accidents
        self._held = None
        self._random = random.Random(accidents.seed)

    async def send(self, frame, payload=()):
        held, self._held = self._held, None
        if self._accidents.hits(frame):
            await self._accident(frame, payload)
        else:
            await self._connection.send(frame, payload)
        if held:
            await self._connection.send(*held)

    async def _accident(self, frame, payload) -> None:
        match self._accidents.fault:
            case "drop":
                pass
            case "delay":
                await asyncio.sleep(DELAY_S)
                await self._connection.send(frame, payload)
            case "corrupt":
                await self._connection.send(self._corrupted(frame), corrupted(payload, self._random))
            case "truncate":
                groups = [[memoryview(bytes(part)) for part in group] for group in payload]
                await self._connection.send(frame, groups[: len(groups) // 2])
                self._connection.close()
            case "twice":
                groups = [[memoryview(bytes(part)) for part in group] for group in payload]
                await self._connection.send(frame, groups)
                await self._connection.send(frame, groups)
            case "reorder":
                self._held = (frame, [[memoryview(bytes(part)) for part in group] for group in payload])
            case "kill":
                self._connection.close()

    def _corrupted(self, frame):
        """Flip one bit of what the frame says. A Ready with bytes behind it keeps its words: its bytes are what is
        hit."""
        spoilt = type(frame)()
        spoilt.CopyFrom(frame)
        bit = 1 << self._random.randrange(16)
        match kind(frame):
            case "want":
                spoilt.want.ticket.mac = bytes([spoilt.want.ticket.mac[0] ^ 1]) + spoilt.want.ticket.mac[1:]
            case "ready" if not frame.ready.payload_bytes:
                spoilt.ready.digests[self._random.randrange(len(spoilt.ready.digests))] ^= bit
            case "ack":
                spoilt.ack.range.token_end ^= bit
            case "confirm":
                spoilt.confirm.range.layer_end ^= bit
            case "end":
                spoilt.end.status = "o" + spoilt.end.status
        return spoilt


def corrupted(payload, rng: random.Random):
    """Return the same groups of buffers with one bit of one of them flipped, in a copy."""
    groups = [[np.frombuffer(bytes(part), np.uint8).copy() for part in group] for group in payload]
    if groups:
        part = rng.choice(rng.choice(groups))
        part[rng.randrange(len(part))] ^= 1 << rng.randrange(8)
    return [[memoryview(part) for part in group] for group in groups]
