"""Pools on a GPU: read there by those who can, through their mirror by all others; and two processes on one GPU."""

import asyncio
import itertools
import json
import sys
import time
from contextlib import contextmanager
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from baton.worker.kv.device_pool import STAGING_BYTES, Crossing
from kvtransfer import errors
from kvtransfer.layout import Box, Range
from kvtransfer.memory.blocks import BlockMemory, Cells
from kvtransfer.memory.digest import cell_sums
from kvtransfer.memory.pools import BytePlaces, DevicePool, OnDevice
from kvtransfer.transports.transport import TransportChoice
from kvtransfer.wire import taker_to_proto
from tests.support.kvtransfer.cuda_stand_in import Cudart, Host
from tests.support.kvtransfer.rig import NUM_BLOCKS, NUM_TOKENS, Rig, assert_still_serves, kind, layout, running
from tests.support.waiting import until_async

SIDES = [sides for sides in itertools.product((True, False), repeat=2) if any(sides)]
UNTOUCHED = 0x55  # of a mirror in the rig


def mirrors(rig: Rig) -> list[np.ndarray]:
    return [np.frombuffer(region.memory, np.uint8) for region in rig.regions]


@pytest.mark.parametrize("form", ("bf16", "int8", "int4"))
@pytest.mark.parametrize("block_size", (1, 16, 128))
def test_sums_on_the_device_are_those_of_the_host(form, block_size):
    """Also where rows have no 8-byte words, and where a range begins and ends inside a block."""
    shape = layout(block_size, form)
    pool = np.random.default_rng(1).integers(0, 256, 320 * shape.block_bytes, dtype=np.uint8)
    host = BlockMemory(pool, shape)
    mirror = np.zeros_like(pool)
    crossing = Crossing(torch.from_numpy(pool), torch.from_numpy(mirror))
    device = OnDevice(mirror, shape, DevicePool(None, crossing.sums, crossing.copy_out, crossing.copy_in))
    ids = np.random.default_rng(2).permutation(320)
    for moved in (Range(0, 64, 0, 3), Range(64, 300, 1, 2), Range(0, 300, 0, 3)):
        for box in (shape.whole[0], Box(0, range(1, 3), range(1, 2))):
            first, last = max(moved.layer_begin, box.layers.start), min(moved.layer_end, box.layers.stop)
            part = moved._replace(layer_begin=first, layer_end=last)
            there, here = (cell_sums(Cells(memory, box, box.layers.start), ids, part) for memory in (device, host))
            assert (there == here).all()
    assert not mirror.any(), "nothing crossed"


def test_a_thread_takes_the_device_of_the_pool_before_its_stream(monkeypatch):
    """An executor's threads are on the first GPU, on which leaving the stream would make a context."""
    entered = []

    @contextmanager
    def recorded(what):
        entered.append(what)
        yield
        entered.append(f"no {what}")

    shape = layout(16, "bf16")
    pool, mirror = (np.zeros(20 * shape.block_bytes, np.uint8) for _ in range(2))
    crossing = Crossing(torch.from_numpy(pool), torch.from_numpy(mirror))
    crossing._stream = SimpleNamespace(synchronize=lambda: None)
    crossing._staged = torch.empty(STAGING_BYTES, dtype=torch.uint8)  # there is no pinned memory here
    monkeypatch.setattr(torch.cuda, "device", lambda device: recorded("device"))
    monkeypatch.setattr(torch.cuda, "stream", lambda stream: recorded("stream"))
    memory = OnDevice(mirror, shape, DevicePool(None, crossing.sums, crossing.copy_out, crossing.copy_in))
    box, whole = shape.whole[0], Range(0, 64, 0, 3)
    cell_sums(Cells(memory, box, box.layers.start), np.arange(20), whole)
    places = BytePlaces(0, (shape.block_bytes,), (shape.block_bytes,))
    crossing.copy_out(places, np.arange(4))
    once = ["device", "stream", "no stream", "no device"]
    assert entered and entered == once * (len(entered) // 4)


def test_the_gpu_is_taken_before_shared_memory_and_no_mirror_is_touched():
    async def main():
        async with running(("cuda_ipc", "shm"), on_gpu=(True, True)) as rig:
            report = await rig.fetch(rig.ready_offer(), rig.destination())
            assert report.transport == "cuda_ipc" and rig.arrived() and "shm: slower" in report.reason
            assert all((mirror == UNTOUCHED).all() for mirror in mirrors(rig))

    asyncio.run(main())


@pytest.mark.parametrize("sides", SIDES)
@pytest.mark.parametrize("name", ("inproc", "shm", "tcp", "grpc"))
@pytest.mark.parametrize("block_size", (16, 128))
def test_other_transports_go_through_the_mirror(name, sides, block_size, small_ranges):
    """By layers too; only what the request has crosses."""

    async def main():
        async with running(name, layout(block_size, "int8"), on_gpu=sides) as rig:
            rig.taker_pool[:] = 0xAA
            offer, destination = rig.offer(num_ready_tokens=64), rig.destination()
            fetching = asyncio.create_task(rig.fetch(offer, destination))
            await until_async(lambda: destination.upto == [64], "the cached prefix leaves at once")
            rig.source.advance("k", 192, 1)
            rig.source.advance("k", 192)
            rig.source.finish("k")
            report = await fetching
            assert report.transport == name and rig.arrived() and destination.upto[-1] == NUM_TOKENS
            behind = -(-NUM_TOKENS // block_size) * block_size
            assert (rig.tokens(rig.taker_pool, rig.taker_ids, NUM_TOKENS, behind) == 0xAA).all()
            strange = [block for block in range(NUM_BLOCKS) if block not in rig.taker_ids[: behind // block_size]]
            assert (rig.taker_pool.reshape(NUM_BLOCKS, -1)[strange] == 0xAA).all()

    asyncio.run(main())


@pytest.mark.parametrize("digest", ("sum", "sha256"))
def test_either_digest_finds_a_bit_that_flipped_on_the_device(digest, small_ranges):
    async def main():
        async with running("cuda_ipc", digest=digest) as rig:

            def fault(frame, connection):
                if kind(frame) == "ready" and frame.ready.range.token_begin == 128:
                    rig.source_pool.reshape(NUM_BLOCKS, -1)[rig.source_ids[128 // 16], 5] ^= 4
                return [frame]

            rig.source.fault = fault
            destination = rig.destination()
            with pytest.raises(errors.DigestMismatch):
                await rig.fetch(rig.ready_offer(), destination)
            assert destination.upto in ([], [64], [64, 128])
            rig.source.cancel("k")
            await assert_still_serves(rig)

    asyncio.run(main())


@pytest.mark.parametrize("sides", [(True, False), (False, True)])
def test_a_pool_in_host_memory_has_no_gpu_to_read(sides):
    async def main():
        async with running(("cuda_ipc", "shm"), on_gpu=sides) as rig:
            report = await rig.fetch(rig.ready_offer(), rig.destination())
            assert report.transport == "shm" and rig.arrived() and "cuda_ipc: not" in report.reason
        async with running("cuda_ipc", on_gpu=sides) as rig:
            with pytest.raises(errors.TransferFailed, match="cuda_ipc: not (offered|for a pool in host memory)"):
                await rig.fetch(rig.ready_offer(), rig.destination())

    asyncio.run(main())


def test_unlike_pools_meet_in_their_mirrors():
    async def main():
        async with running(("cuda_ipc", "tcp"), layout(16), taker_shape=layout(64), on_gpu=(True, True)) as rig:
            report = await rig.fetch(rig.ready_offer(), rig.destination())
            assert report.transport == "tcp" and rig.arrived() and "cuda_ipc: not between blocks" in report.reason

    asyncio.run(main())


def test_memory_that_cannot_be_opened_is_tried_once():
    """Two containers without a PID namespace in common: the next transport does it, and is remembered."""

    async def main():
        async with running(("cuda_ipc", "shm"), on_gpu=(True, True)) as rig:
            rig.gpus[1].library.cannot_open = True
            destination = rig.destination()
            report = await rig.fetch(rig.ready_offer(), destination)
            assert report.transport == "shm" and rig.arrived() and destination.upto == [NUM_TOKENS]
            assert "shm, because cuda_ipc: the source's GPU memory cannot be opened here" in report.reason
            rig.gpus[1].library.cannot_open = False
            report = await rig.fetch(rig.ready_offer("again"), rig.destination())
            assert report.transport == "shm" and "cuda_ipc: did not work with this source" in report.reason
        async with running("cuda_ipc") as rig:
            rig.gpus[1].library.cannot_open = True
            with pytest.raises(errors.TransportBroken, match="cannot be opened here"):
                await rig.fetch(rig.ready_offer(), rig.destination())
            rig.source.cancel("k")

    asyncio.run(main())


def test_gpus_between_which_copies_do_not_arrive():
    """CUDA offers them, and an IOMMU breaks them: a canary shows it before any KV is copied."""

    async def main():
        async with running(("cuda_ipc", "shm"), on_gpu=(True, True)) as rig:
            rig.gpus[1].library.host.breaks_copies = True
            report = await rig.fetch(rig.ready_offer(), rig.destination())
            assert report.transport == "shm" and rig.arrived() and not rig.fetcher.counters["digest_mismatch"]
            assert "bytes copied from the source's GPU arrived wrong" in report.reason

    asyncio.run(main())


def test_a_transport_that_brings_wrong_bytes_twice_is_set_aside():
    async def main():
        async with running(("cuda_ipc", "shm"), on_gpu=(True, True)) as rig:
            host = rig.gpus[1].library.host
            # A correct copy in between resets the count.
            for key, breaks in zip("abcde", (False, True, False, True, True), strict=True):
                host.breaks_copies = breaks
                offer = rig.ready_offer(key)
                if not breaks:
                    assert (await rig.fetch(offer, rig.destination())).transport == "cuda_ipc"
                    continue
                with pytest.raises(errors.DigestMismatch):
                    await rig.fetch(offer, rig.destination())
                rig.source.cancel(key)
            report = await rig.fetch(rig.ready_offer(), rig.destination())
            assert report.transport == "shm" and rig.arrived()
            assert "cuda_ipc: did not work with this source" in report.reason

    asyncio.run(main())


def test_sources_that_brought_wrong_bytes_once_and_are_gone_are_forgotten():
    """Workers are replaced, and each has an instance of its own."""

    async def main():
        async with running(("shm",)) as rig:
            for index in range(1000):
                mismatch = errors.DigestMismatch("tokens 0 to 64 are not what the source has")
                rig.fetcher._note_mismatch(TransportChoice((), ""), index.to_bytes(16), "shm", mismatch)
            assert len(rig.fetcher._digest_mismatches) <= 256

    asyncio.run(main())


@pytest.mark.parametrize("names", [("cuda_ipc", "shm"), ("shm", "cuda_ipc")])
def test_a_block_of_which_each_half_came_another_way(names, small_ranges, monkeypatch):
    """Neither transport's second half may overwrite what the other has brought of the block."""
    monkeypatch.setattr("kvtransfer.transfer.fetcher._PAUSES_S", (0.001,))

    async def main():
        async with running(names, layout(128), on_gpu=(True, True)) as rig:
            chosen = list(names)
            opened = rig.fetcher._dialer.open

            async def reached(endpoint, shape):
                if endpoint.transport != chosen[0]:
                    raise errors.PeerLost("not now")
                return await opened(endpoint, shape)

            def fault(frame, connection):
                if kind(frame) == "ready" and frame.ready.range.token_begin == 64 and len(chosen) == 2:
                    del chosen[0]
                    connection.close()
                return [frame]

            rig.fetcher._dialer.open, rig.source.fault = reached, fault
            destination = rig.destination()
            report = await rig.fetch(rig.ready_offer(), destination)
            assert report.transport == names[1] and rig.arrived() and destination.upto[0] == 64

    asyncio.run(main())


def test_a_gpu_whose_memory_cannot_be_shared_is_not_offered(monkeypatch, caplog):
    monkeypatch.setattr(Cudart, "cudaIpcGetMemHandle", lambda self, out, address: 801)

    async def main():
        async with running("shm", on_gpu=(True, True)) as rig:
            assert "cuda_ipc" not in [endpoint.transport for endpoint in rig.source.endpoints()]
            await rig.fetch(rig.ready_offer(), rig.destination())
            assert rig.arrived()

    asyncio.run(main())
    assert "cuda_ipc is not offered" in caplog.text and "cudaIpcGetMemHandle" in caplog.text


# ---- two processes ----

SOURCE = """
import asyncio, json, pathlib, sys
import numpy as np
from tests.support.kvtransfer.cuda_stand_in import Host
from tests.support.kvtransfer.pool_on_gpu import Gpu
from tests.support.kvtransfer.rig import IDENTITY, NUM_BLOCKS, layout, span_hashes
from kvtransfer.transports.endpoints import Address
from kvtransfer.layout import BlockRef, PromptKV
from kvtransfer.memory.region import Region
from kvtransfer.transfer.local_pool import LocalPool
from kvtransfer.transfer.source import Source
from kvtransfer.transports.transport import local_host_id
from kvtransfer.wire import taker_from_proto
from baton.v1 import kv_pb2

async def main(folder):
    gpus, sockets = pathlib.Path(folder, "gpus"), pathlib.Path(folder, "sockets")
    region = Region.create(NUM_BLOCKS * layout().block_bytes)
    gpu = Gpu(Host(gpus), region)
    gpu.pool[:] = np.random.default_rng(7).integers(0, 256, len(gpu.pool), dtype=np.uint8)
    over = lambda *_: print(json.dumps("over"), flush=True)
    pool = LocalPool.of(region.memory, layout(), region=region, device=gpu.device)
    source = Source(pool, IDENTITY, local_host_id(sockets), over, generations=lambda block: 5, transports=("cuda_ipc",))
    await source.start(Address(socket_folder=sockets))
    print(json.dumps([endpoint.transport for endpoint in source.endpoints()]), flush=True)
    read = lambda: asyncio.get_running_loop().run_in_executor(None, sys.stdin.readline)
    while line := await read():
        num_tokens, taker = json.loads(line)
        blocks = tuple(BlockRef(block, 5) for block in range(layout().num_blocks(num_tokens)))
        hashes, taker = span_hashes(num_tokens), taker_from_proto(kv_pb2.Taker.FromString(bytes.fromhex(taker)))
        offer = source.offer("k", PromptKV(num_tokens, blocks, tuple(hashes), hashes[-1]), taker, num_ready_tokens=64)
        print(json.dumps([offer.handle.hex(), offer.ticket.hex()]), flush=True)
        source.finish("k")
    await source.stop()
    gpu.close()

asyncio.run(main(sys.argv[1]))
"""


def test_two_processes_on_one_gpu(tmp_path):
    async def main():
        for name in ("gpus", "sockets"):
            (tmp_path / name).mkdir()
        rig = Rig("cuda_ipc", layout(), taker_folder=tmp_path / "sockets", host=Host(tmp_path / "gpus"))
        process = await asyncio.create_subprocess_exec(
            sys.executable, "-c", SOURCE, str(tmp_path), stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE
        )

        async def said():
            return json.loads(await process.stdout.readline())

        async with asyncio.timeout(60):
            assert await said() == ["cuda_ipc"]
            taker = taker_to_proto(rig.fetcher.taker()).SerializeToString().hex()
            process.stdin.write(json.dumps([NUM_TOKENS, taker]).encode() + b"\n")
            handle, ticket = (bytes.fromhex(each) for each in await said())
            destination = rig.destination()
            report = await rig.fetcher.fetch(handle, ticket, destination, time.monotonic() + 30)
            assert report.transport == "cuda_ipc" and destination.upto[-1] == NUM_TOKENS
            rig.source_ids = np.arange(NUM_BLOCKS)  # the other process has the same bytes, its blocks in order
            assert rig.arrived() and await said() == "over"
            process.stdin.close()
            assert await process.wait() == 0
        rig.close()

    asyncio.run(main())
