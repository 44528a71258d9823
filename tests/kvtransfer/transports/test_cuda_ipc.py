"""CUDA IPC against a stand-in library: what is asked of the real one, in which order, and what its refusals become.
That the bytes arrive on a GPU is for the test below that needs one."""

import asyncio
import subprocess
import sys
import threading

import numpy as np
import pytest

from baton.v1 import kv_pb2
from kvtransfer import errors
from kvtransfer.layout import KVGroup, KVLayout, Range
from kvtransfer.memory.byte_runs import BoxOfPool, merged_runs
from kvtransfer.memory.cuda_runtime import CudaError, CudaRuntime, find_runtime
from kvtransfer.memory.device_memory import DeviceRegion
from kvtransfer.transports import cuda_ipc
from kvtransfer.transports.cuda_ipc import Copier, CudaIpcListener
from tests.support.kvtransfer.cuda_stand_in import Cudart, Host
from tests.support.kvtransfer.pool_on_gpu import copied_to_host

LAYOUT = KVLayout((KVGroup("paged", 2, 2, 8, "int8", 16),))
NUM_BLOCKS = 20
BLOCK = LAYOUT.block_bytes


class Pair:
    """A source and a taker in two processes of one host, and the connection between them."""

    def __init__(self, folder, *, taker_device=0, delay=2, host=None):
        self.host = host or Host()
        self.libraries = Cudart(self.host), Cudart(self.host, delay)
        runtimes = [CudaRuntime(library) for library in self.libraries]
        devices = (0, taker_device)
        self.regions = [DeviceRegion(*each, NUM_BLOCKS * BLOCK) for each in zip(runtimes, devices)]
        rng = np.random.default_rng(3)
        self.bytes = rng.integers(0, 256, NUM_BLOCKS * BLOCK, dtype=np.uint8)
        self.pool(0)[:] = self.bytes
        self.copier = Copier(self.regions[1])
        self.folder = folder
        self.ids = [rng.permutation(NUM_BLOCKS) for _ in range(2)]

    def pool(self, side: int) -> np.ndarray:
        region = self.regions[side]
        return np.frombuffer(self.libraries[side].allocations[region.address], np.uint8, region.num_bytes)

    def runs(self, moved: Range) -> np.ndarray:
        whole = BoxOfPool(LAYOUT, LAYOUT.whole[0])
        return merged_runs(whole, whole, *self.ids, moved)

    async def open(self):
        connections: asyncio.Queue = asyncio.Queue()
        self.listener = CudaIpcListener(self.regions[0], BLOCK, self.folder, connections.put_nowait)
        self.taker = await cuda_ipc.connect(self.listener.address, self.folder, self.copier, BLOCK)
        self.source = await connections.get()
        return self

    async def share(self):
        await self.source.share_memory()
        await self.source.send(kv_pb2.KVFrame(renew=kv_pb2.Renew()))
        assert (await self.taker.receive()).WhichOneof("kind") == "renew"

    async def close(self):
        self.taker.close(), self.source.close()
        await self.listener.close()
        self.copier.close()
        for region in self.regions:
            region.close(), region.close()
        for library in self.libraries:
            assert not (library.allocations or library.opened or library.events or library.streams)


@pytest.mark.parametrize("taker_device", (0, 1))
def test_a_range_arrives(tmp_path, taker_device):
    async def main():
        pair = await Pair(tmp_path, taker_device=taker_device).open()
        await pair.share()
        for moved in (Range(0, 64, 0, 2), Range(64, 300, 0, 1), Range(64, 300, 1, 2)):
            await pair.taker.read(pair.runs(moved))
        rows = [pool.reshape(NUM_BLOCKS, BLOCK)[ids] for pool, ids in zip((pair.pool(0), pair.pool(1)), pair.ids)]
        assert (rows[0][:18] == rows[1][:18]).all() and not (rows[0][18:] == rows[1][18:]).all(), "whole blocks, a tail"
        assert pair.libraries[1].device == taker_device
        found = copied_to_host(pair.regions[1], pair.copier.stream, 0, NUM_BLOCKS * BLOCK)
        assert (found == pair.pool(1)).all()
        await pair.close()

    asyncio.run(main())


def test_neighbours_are_one_copy(tmp_path):
    async def main():
        pair = await Pair(tmp_path).open()
        pair.ids = [np.arange(NUM_BLOCKS)] * 2
        await pair.share()
        before = pair.libraries[1].num_copies
        await pair.taker.read(pair.runs(Range(0, 16 * NUM_BLOCKS, 0, 2)))
        assert pair.libraries[1].num_copies == before + 1 and (pair.pool(1) == pair.bytes).all()
        await pair.close()

    asyncio.run(main())


def test_an_allocation_is_opened_once_for_all_lines(tmp_path):
    async def main():
        pair = await Pair(tmp_path).open()
        await pair.share()
        first = pair.taker
        connections: asyncio.Queue = asyncio.Queue()
        pair.listener._listener._on_connection = connections.put_nowait
        pair.taker = await cuda_ipc.connect(pair.listener.address, tmp_path, pair.copier, BLOCK)
        second, pair.source = pair.source, await connections.get()
        await pair.share()
        first.close(), second.close()
        await pair.taker.read(pair.runs(Range(0, 64, 0, 2)))
        await pair.close()

    asyncio.run(main())


def test_a_pool_stays_open_until_its_process_is_gone(tmp_path, monkeypatch):
    """Opening maps tens of GiB, closing waits for the device: neither may happen in each fetch, nor in the loop."""
    monkeypatch.setattr(cuda_ipc, "WATCH_S", 0.01)

    async def main():
        pair = Pair(tmp_path)
        pair.host.open_s = 0.05
        listener = (await pair.open()).listener
        await pair.share()
        pair.taker.close(), pair.source.close()
        for _ in range(3):
            connections: asyncio.Queue = asyncio.Queue()
            listener._listener._on_connection = connections.put_nowait
            pair.taker = await cuda_ipc.connect(listener.address, tmp_path, pair.copier, BLOCK)
            pair.source = await connections.get()
            await pair.share()
            await pair.taker.read(pair.runs(Range(0, 64, 0, 2)))
            pair.taker.close()
        library = pair.libraries[1]
        assert library.num_opened == 1 and threading.get_ident() not in library.opened_in
        await asyncio.sleep(0.05)
        assert len(library.opened) == 1, "its process still runs"
        await listener.close()  # as at the end of the process
        async with asyncio.timeout(5):
            while library.opened:
                await asyncio.sleep(0.01)
        await pair.close()

    asyncio.run(main())


def test_a_pool_that_takes_too_long_to_open(tmp_path, monkeypatch):
    monkeypatch.setattr(cuda_ipc, "OPEN_S", 0.02)

    async def main():
        pair = await Pair(tmp_path).open()
        pair.host.open_s = 0.2
        with pytest.raises(errors.TransportBroken, match="not opened within 0.02 s"):
            await pair.share()
        await asyncio.sleep(0.3)
        await pair.close()

    asyncio.run(main())


def test_a_pool_that_is_being_opened_at_the_end_is_closed_too(tmp_path):
    """The thread that opened it went on: it stayed open, and the GPU's memory that it writes into was freed."""

    async def main():
        pair = await Pair(tmp_path).open()
        library, has_begun, may_open = pair.libraries[1], asyncio.Event(), threading.Event()
        loop, open_handle = asyncio.get_running_loop(), library.cudaIpcOpenMemHandle

        def held_back(*arguments) -> int:
            loop.call_soon_threadsafe(has_begun.set)
            may_open.wait()
            return open_handle(*arguments)

        library.cudaIpcOpenMemHandle = held_back
        sharing = asyncio.create_task(pair.share())
        await has_begun.wait()
        sharing.cancel()
        await asyncio.wait([sharing])
        threading.Timer(0.1, may_open.set).start()
        await pair.close()
        assert library.num_opened == 1, "it was waited for"

    asyncio.run(main())


def test_cancelled_reads_have_passed_when_they_end(tmp_path):
    async def main():
        pair = await Pair(tmp_path, delay=30).open()
        await pair.share()
        reading = asyncio.create_task(pair.taker.read(pair.runs(Range(0, 320, 0, 2))))
        await asyncio.sleep(0)
        reading.cancel()
        await asyncio.sleep(0)
        reading.cancel()
        await asyncio.wait({reading})
        assert reading.cancelled() and not any(pair.libraries[1].streams.values())
        await pair.close()

    asyncio.run(main())


def test_a_copy_that_is_late_has_passed_when_its_read_ends(tmp_path, monkeypatch):
    """Else it could write into blocks that belong to another request by then."""
    monkeypatch.setattr("kvtransfer.transports.socket_connection.SILENCE_S", 0.003)

    async def main():
        pair = await Pair(tmp_path, delay=600).open()
        await pair.share()
        with pytest.raises(errors.PeerLost, match=r"took [\d.]+ s, more than 0.003 s"):
            await pair.taker.read(pair.runs(Range(0, 64, 0, 2)))
        assert not any(pair.libraries[1].streams.values())
        await pair.close()

    asyncio.run(main())


def test_a_copy_that_never_passes(tmp_path, monkeypatch):
    monkeypatch.setattr("kvtransfer.transports.socket_connection.SILENCE_S", 0.01)
    monkeypatch.setattr(cuda_ipc, "STUCK_S", 0.05)

    async def main():
        pair = await Pair(tmp_path, delay=1 << 30).open()
        await pair.share()
        with pytest.raises(errors.DeviceHangs, match="has not passed after"):
            await pair.taker.read(pair.runs(Range(0, 64, 0, 2)))
        await pair.close()

    asyncio.run(main())


def test_a_copy_that_is_refused_waits_for_those_before(tmp_path):
    async def main():
        pair = await Pair(tmp_path, delay=1 << 30).open()
        await pair.share()
        pair.libraries[1].fail_copy_at = pair.libraries[1].num_copies + 5
        with pytest.raises(CudaError, match=r"cudaMemcpy\w*: stand-in error 1 \(1\)"):
            await pair.taker.read(pair.runs(Range(0, 320, 0, 2)))
        assert not any(pair.libraries[1].streams.values())
        await pair.close()

    asyncio.run(main())


def test_what_a_taker_refuses(tmp_path):
    async def main():
        pair = await Pair(tmp_path).open()
        with pytest.raises(errors.ProtocolError, match="before the source has shared"):
            await pair.taker.read(pair.runs(Range(0, 64, 0, 2)))
        true = pair.source._mapping
        for changes in (dict(access=b"short"), dict(block_bytes=BLOCK + 1), dict(access=bytes(64))):
            pair.source._mapping = kv_pb2.Mapping()
            pair.source._mapping.CopyFrom(true)
            pair.source._mapping.MergeFrom(kv_pb2.Mapping(**changes))
            with pytest.raises(errors.KVError):
                await pair.share()
            await pair.taker.receive()  # what was sent behind it
        pair.source._mapping = true
        await pair.share()
        with pytest.raises(errors.ProtocolError, match="beyond a pool"):
            await pair.taker.read(pair.runs(Range(0, 64, 0, 2)) + [NUM_BLOCKS * BLOCK, 0, 0, 0, 0, 0])
        with pytest.raises(errors.ProtocolError, match="second Mapping"):
            await pair.share()
        await pair.close()

    asyncio.run(main())


def test_gpus_that_do_not_reach_each_other(tmp_path):
    async def main():
        pair = await Pair(tmp_path, taker_device=1).open()
        pair.host.peers = frozenset()
        for address in (pair.listener.address, "baton-kv-a/kv@0000:99:00.0"):
            with pytest.raises(errors.PeerLost, match="cannot be read from here"):
                await cuda_ipc.connect(address, tmp_path, pair.copier, BLOCK)
        for address in ("baton-kv-a/kv", "@", "../x@0000:02:00.0"):
            with pytest.raises(errors.PeerLost):
                await cuda_ipc.connect(address, tmp_path, pair.copier, BLOCK)
        await pair.close()

    asyncio.run(main())


def test_an_allocation_that_fails_is_named(tmp_path):
    runtime = CudaRuntime(Cudart(Host(num_bytes=1000)))
    with pytest.raises(CudaError, match="cudaMalloc"):
        DeviceRegion(runtime, 0, 1001)
    with pytest.raises(CudaError, match="cudaSetDevice"):
        DeviceRegion(runtime, 7, 10)
    with pytest.raises(ValueError):
        DeviceRegion(runtime, 0, 0)


def test_without_a_gpu_there_is_no_runtime():
    runtime = find_runtime()
    assert runtime is None or runtime.num_devices() > 0


TAKER = """
import asyncio, sys, pathlib, numpy as np
from kvtransfer.transports import cuda_ipc
from kvtransfer.memory.cuda_runtime import find_runtime
from kvtransfer.memory.device_memory import DeviceRegion
from tests.support.kvtransfer.pool_on_gpu import copied_to_host
async def main(address, folder, num_bytes):
    region = DeviceRegion(find_runtime(), 0, num_bytes)
    copier = cuda_ipc.Copier(region)
    connection = await cuda_ipc.connect(address, pathlib.Path(folder), copier, num_bytes)
    await connection.receive()
    half = num_bytes // 2
    await connection.read(np.array([[0, half, half, half, half, 1], [0, 0, 100, 1000, 1000, 50]]))
    print(copied_to_host(region, copier.stream, 0, num_bytes).tobytes().hex())
    connection.close(), copier.close(), region.close()
asyncio.run(main(sys.argv[1], sys.argv[2], int(sys.argv[3])))
"""


@pytest.mark.gpu
@pytest.mark.skipif(find_runtime() is None, reason="needs a CUDA device")
def test_two_processes_on_one_gpu(tmp_path):
    torch = pytest.importorskip("torch")

    async def main():
        num_bytes, connections = 1 << 20, asyncio.Queue()
        region = DeviceRegion(find_runtime(), 0, num_bytes)
        expected = np.random.default_rng(0).integers(0, 256, num_bytes, dtype=np.uint8)
        torch.as_tensor(region, device="cuda:0").copy_(torch.from_numpy(expected))
        torch.cuda.synchronize()
        listener = CudaIpcListener(region, num_bytes, tmp_path, connections.put_nowait)
        command = [sys.executable, "-c", TAKER, listener.address, str(tmp_path), str(num_bytes)]
        taker = await asyncio.create_subprocess_exec(*command, stdout=subprocess.PIPE)
        async with asyncio.timeout(60):
            connection = await connections.get()
            await connection.share_memory()
            await connection.send(kv_pb2.KVFrame(renew=kv_pb2.Renew()))
            output, _ = await taker.communicate()
        found = np.frombuffer(bytes.fromhex(output.decode().strip()), np.uint8)
        assert (found[num_bytes // 2 :] == expected[: num_bytes // 2]).all()
        rows = np.arange(50)[:, None] * 1000 + np.arange(100)
        assert (found[rows] == expected[rows]).all() and not found[100:1000].any()
        connection.close()
        await listener.close()
        region.close()

    asyncio.run(main())
