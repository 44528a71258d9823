"""Messages of a rank of another host, in pieces."""

import asyncio
import json
from collections import Counter

import torch

from baton.engine.parallel.pipeline import PipelineLeader
from baton.worker.ranks.stream import _NOTE, JoinedStream


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


async def test_messages_of_two_threads_come_out_whole():
    """Blocks of KV beside steps, and rows beside beats: a long message goes in pieces, and others would come between
    them."""
    sending, arriving, pieces, nothing = JoinedStream(), JoinedStream(), asyncio.Queue(), asyncio.Event()
    reads = ((sending, nothing.wait), (arriving, pieces.get))
    running = [asyncio.create_task(stream.run(read, pieces.put)) for stream, read in reads]
    counts = {10 << 20: 6, 5: 2000}  # of messages, by their bytes

    def send_all(num_bytes: int) -> None:
        for _ in range(counts[num_bytes]):
            sending.send(bytes(num_bytes))

    def receive_all() -> Counter:
        return Counter(len(arriving.receive()) for _ in range(sum(counts.values())))

    *_, found = await asyncio.gather(
        *(asyncio.to_thread(send_all, num_bytes) for num_bytes in counts), asyncio.to_thread(receive_all)
    )
    sending.close()
    arriving.close()
    await asyncio.gather(*running)
    assert found == counts


async def test_a_step_goes_before_kv_that_waits():
    """Behind the one message of it that is under way."""
    sending, pieces, nothing = JoinedStream(), asyncio.Queue(), asyncio.Event()
    may_write = asyncio.Semaphore(0)

    async def write(piece: bytes) -> None:
        pieces.put_nowait(piece)
        await may_write.acquire()

    running = asyncio.create_task(sending.run(nothing.wait, write))
    giving = [asyncio.create_task(sending.send_kv(b"kv" + bytes(1 << 20))) for _ in range(3)]
    first = await pieces.get()
    await asyncio.to_thread(sending.send, b"step")
    for _ in range(8):
        may_write.release()
    await asyncio.gather(*giving)
    second, *others = [await pieces.get() for _ in range(3)]
    assert second[1:] == b"step" and all(piece[1:3] == b"kv" for piece in (first, *others))
    sending.close()
    await running


async def test_a_note_that_fails_is_logged_and_the_next_one_is_read(caplog):
    stream, chunks, came, nothing = JoinedStream(), asyncio.Queue(), asyncio.Event(), asyncio.Queue()

    def take(note: dict) -> None:
        if note == {"advance": "00"}:
            raise ValueError("the watermark goes back")
        came.set()

    stream.on_note = take
    for note in ({"advance": "00"}, {"finish": "00"}):
        chunks.put_nowait(_NOTE + json.dumps(note).encode())
    running = asyncio.create_task(stream.run(chunks.get, nothing.put))
    coming = asyncio.create_task(came.wait())
    await asyncio.wait([running, coming], return_when=asyncio.FIRST_COMPLETED)
    assert came.is_set() and "the watermark goes back" in caplog.text
    stream.close()
    await running
