"""Messages of a rank of another host, in pieces."""

import asyncio

import torch

from baton.engine.parallel.pipeline import PipelineLeader
from baton.worker.ranks.stream import JoinedStream


async def test_a_long_message_on_its_way_is_a_sign_of_life():
    """Rows of a step may take longer over a slow link than the silence after which a rank is lost."""
    sending, arriving, pieces = JoinedStream(), JoinedStream(), asyncio.Queue()
    nothing = asyncio.Event()
    running = [asyncio.create_task(sending.run(nothing.wait, pieces.put))]
    sending.send(bytes(10 << 20))
    first, second, last = [await pieces.get() for _ in range(3)]
    leader = PipelineLeader([arriving], torch.zeros(1, 1))
    running.append(asyncio.create_task(arriving.run(pieces.get, pieces.put)))
    for number, piece in enumerate((first, second), 1):
        pieces.put_nowait(piece)
        while leader.beat_of(1) < number:
            await asyncio.sleep(0)
    assert arriving._incoming.empty() and len(first) + len(second) + len(last) == (10 << 20) + 3
    leader.lose()
    sending.close()
    await asyncio.gather(*running)
