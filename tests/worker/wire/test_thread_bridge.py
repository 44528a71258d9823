"""Outputs of the engine's thread arrive in order, tokens together, everything else without waiting."""

import asyncio
import threading

from baton.engine.core.request import PrefillDone, TokenRun
from baton.worker.wire import thread_bridge
from baton.worker.wire.thread_bridge import ThreadBridge


def run_of(index: int) -> TokenRun:
    return TokenRun(("r", 1), 0, index, (index,), (), None)


async def settled(delivered: list, num_outputs: int) -> None:
    async with asyncio.timeout(20):
        while sum(map(len, delivered)) < num_outputs:
            await asyncio.sleep(0.001)


async def test_from_another_thread_in_order_and_whole():
    delivered: list[list] = []
    it = ThreadBridge(asyncio.get_running_loop(), lambda outputs: delivered.append(list(outputs)))
    thread = threading.Thread(target=lambda: [it.put([run_of(i)]) for i in range(2000)])
    thread.start()
    await settled(delivered, 2000)
    thread.join()
    assert [output.first_index for batch in delivered for output in batch] == list(range(2000))
    await asyncio.sleep(3 * thread_bridge.GAP_S)  # the timer has found nothing, and stopped
    it.put([run_of(2000)])
    await settled(delivered, 2001)


async def test_tokens_gather_and_endings_do_not_wait(monkeypatch):
    monkeypatch.setattr(thread_bridge, "GAP_S", 3600.0)
    delivered: list[list] = []
    it = ThreadBridge(asyncio.get_running_loop(), lambda outputs: delivered.append(list(outputs)))
    it.put([run_of(0)])
    await settled(delivered, 1)
    it.put([run_of(1)])
    it.put([run_of(2)])
    await asyncio.sleep(0.01)
    assert len(delivered) == 1
    done = object.__new__(PrefillDone)
    it.put([done])
    await settled(delivered, 4)
    assert [len(batch) for batch in delivered] == [1, 3] and delivered[1][-1] is done
