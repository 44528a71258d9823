"""Cases of shared memory alone: its sockets, its mappings, its folder."""

import asyncio
import errno
import gc
import os
import socket
import time
from pathlib import Path
from types import SimpleNamespace

import pytest

from kvtransfer.errors import TransferFailed
from kvtransfer.memory import region
from kvtransfer.transfer.fetcher import Fetcher
from kvtransfer.transfer.local_pool import LocalPool
from kvtransfer.transfer.source import Source
from kvtransfer.transports import shm, socket_folder
from kvtransfer.transports.endpoints import Address
from kvtransfer.transports.transport import local_host_id
from tests.support.kvtransfer.rig import NUMERICS, running
from tests.support.waiting import until_async


def socket_of(source: Source) -> Path:
    address = next(endpoint.address for endpoint in source.endpoints() if endpoint.transport == "shm")
    return Path(socket_folder.socket_path(socket_folder.default_parent(), address))


def num_mapped() -> int:
    """Anonymous files that this process maps."""
    return Path("/proc/self/maps").read_text().count("memfd:")


def test_same_pool_is_mapped_once():
    async def main():
        async with running("shm") as rig:
            await rig.fetch(rig.ready_offer("a"), rig.destination())
            await rig.fetch(rig.ready_offer("b"), rig.destination())
            assert len(rig.fetcher._dialer._mappings._mapped) == 1
            memory = next(iter(rig.fetcher._dialer._mappings._mapped.values())).memory
            with pytest.raises(ValueError):
                memory.blocks[0, 0] = 1  # another process's pool can be read, not written

    asyncio.run(main())


def test_a_pool_is_unmapped_when_its_process_is_gone(monkeypatch):
    """The host has its memory back only then; a worker that was moved away is fetched from no more."""
    monkeypatch.setattr(shm, "WATCH_S", 0.01)

    async def main():
        async with running("shm") as rig:
            gc.collect()  # pools of other tests go now, or once they are counted
            before = num_mapped()
            await rig.fetch(rig.ready_offer("a"), rig.destination())
            await asyncio.sleep(0.05)
            assert num_mapped() == before + 1, "its process still runs"
            await rig.source.stop()  # as at the end of the process
            await until_async(lambda: num_mapped() == before, "the pool to be unmapped")

    asyncio.run(main())


def failing_once(function):
    """It, but the first call finds no descriptor left."""
    failures = [OSError(errno.EMFILE, os.strerror(errno.EMFILE))]

    def failing(*args, **options):
        if failures:
            raise failures.pop()
        return function(*args, **options)

    return failing


@pytest.mark.parametrize("lacking", ["the taker's socket", "the source's copy to send", "the taker's mapping"])
def test_a_side_without_descriptors_for_a_moment_is_tried_again(lacking, monkeypatch):
    async def main():
        async with running("shm") as rig:
            if lacking == "the taker's socket":
                made = SimpleNamespace(AF_UNIX=socket.AF_UNIX, SOCK_STREAM=socket.SOCK_STREAM)
                made.socket = failing_once(socket.socket)
                monkeypatch.setattr(shm, "socket", made)
            elif lacking == "the source's copy to send":
                monkeypatch.setattr(region.os, "dup", failing_once(os.dup))
            else:
                monkeypatch.setattr(region.mmap, "mmap", failing_once(region.mmap.mmap))
            await rig.fetch(rig.ready_offer(), rig.destination())
            assert rig.arrived()

    asyncio.run(main())


def test_a_pool_that_cannot_be_mapped_has_no_shm():
    async def main():
        async with running("tcp") as rig:
            pool = LocalPool.of(bytearray(rig.layout.block_bytes), rig.layout)
            plain = Source(pool, rig.source.identity, "host", print, generations=int)
            await plain.start(Address(advertise_host="kv.example"))
            assert [endpoint.transport for endpoint in plain.endpoints()] == ["inproc", "tcp", "grpc"]
            assert all(endpoint.address.startswith("kv.example:") for endpoint in plain.endpoints()[1:])
            await plain.stop()

    asyncio.run(main())


def test_stop_leaves_no_socket_behind():
    async def main():
        async with running("shm") as rig:
            path = socket_of(rig.source)
            assert path.is_socket() and path.parent.stat().st_mode & 0o777 == 0o700
            await rig.source.stop()
            assert not path.parent.exists()

    asyncio.run(main())


def test_next_transport_when_the_best_cannot_be_reached():
    async def main():
        async with running("shm") as rig:
            pool = LocalPool.of(rig.regions[1].memory, rig.layout)
            both = Fetcher(pool, b"decode-0", 22, local_host_id(), ("shm", "tcp"), numerics_class=NUMERICS)
            socket_of(rig.source).unlink()
            offer = rig.ready_offer()
            report = await both.fetch(offer.handle, offer.ticket, rig.destination(), time.monotonic() + 10)
            assert report.transport == "tcp" and rig.arrived()
            assert report.reason.startswith("tcp, because shm: the source cannot be reached")
            both.close()

    asyncio.run(main())


def test_two_folders_are_two_hosts(tmp_path):
    """Containers meet by a folder that both see, whatever their mount namespaces; without one they take the network."""
    ours, theirs = tmp_path / "ours", tmp_path / "theirs"
    ours.mkdir(), theirs.mkdir()
    seen_elsewhere = tmp_path / "volume"
    seen_elsewhere.symlink_to(ours)  # the same volume under another path
    assert local_host_id(ours) == local_host_id(seen_elsewhere) != local_host_id(theirs)

    async def main():
        async with running("shm", source_folder=ours, taker_folder=seen_elsewhere) as rig:
            report = await rig.fetch(rig.ready_offer(), rig.destination())
            assert report.transport == "shm" and rig.arrived()
        async with running("shm", source_folder=ours, taker_folder=theirs) as rig:
            with pytest.raises(TransferFailed, match="shm: another host"):
                await rig.fetch(rig.ready_offer(), rig.destination())
            rig.source.cancel("k")

    asyncio.run(main())


async def test_a_taker_waits_while_the_backlog_is_full(tmp_path):
    """A unix socket answers EAGAIN then, which asyncio takes for a connection on its way."""
    folder = socket_folder.SocketFolder(tmp_path)
    crowd = []
    with folder.bind() as listening:
        listening.listen(0)
        crowd.append(await shm.reached(folder.address, tmp_path))
        taker = asyncio.create_task(shm.reached(folder.address, tmp_path))
        await asyncio.sleep(0.05)
        assert not taker.done()
        crowd.append(listening.accept()[0])
        connected = await asyncio.wait_for(taker, 5)
        assert connected.getpeername() == str(tmp_path / folder.address)
        for sock in (*crowd, connected):
            sock.close()
    folder.remove()
