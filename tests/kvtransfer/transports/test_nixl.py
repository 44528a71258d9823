"""NIXL over pools in host memory and on GPUs, with stand-ins for both; where NIXL is installed it runs in the suite of
all transports as well."""

import asyncio
import importlib
import sys

import numpy as np
import pytest

from kvtransfer import errors
from kvtransfer.transports import nixl_engine, transport
from kvtransfer.transports.nixl_engine import NixlAgent, Segment
from tests.support.kvtransfer.nixl_stand_in import Network
from tests.support.kvtransfer.rig import NUM_BLOCKS, Rig, assert_still_serves, kind, layout, running

SIDES = [(True, True), (True, False), (False, True), (False, False)]
UNTOUCHED = 0x55


@pytest.fixture
def network(monkeypatch) -> Network:
    found = Network([])
    monkeypatch.setattr(nixl_engine, "find_package", lambda: "stand_in")
    monkeypatch.setattr(transport, "find_package", lambda: "stand_in")
    monkeypatch.setitem(sys.modules, "stand_in", importlib.import_module("tests"))
    monkeypatch.setitem(sys.modules, "stand_in._api", found.api)
    made = Rig.__init__

    def with_gpus(rig: Rig, *args, **options) -> None:
        made(rig, *args, **options)
        found.gpus += [gpu.library for gpu in rig.gpus if gpu]

    monkeypatch.setattr(Rig, "__init__", with_gpus)
    return found


@pytest.mark.parametrize("block_size", (16, 128))
@pytest.mark.parametrize("sides", SIDES)
def test_a_pool_is_read_and_written_where_it_is(network, sides, block_size):
    async def main():
        async with running("nixl", layout(block_size, "int8"), on_gpu=sides) as rig:
            report = await rig.fetch(rig.ready_offer(), rig.destination())
            assert report.transport == "nixl" and rig.arrived()
            source, taker = ("VRAM" if on_gpu else "DRAM" for on_gpu in sides)
            assert set(network.moved) == {(taker, source)}
            for region, gpu in zip(rig.regions, rig.gpus):
                assert gpu is None or (np.frombuffer(region.memory, np.uint8) == UNTOUCHED).all(), "no mirror is used"
            await assert_still_serves(rig)
        assert not any(agent.registered for agent in network.agents.values())

    asyncio.run(main())


def test_a_bit_that_flipped_on_the_gpu_is_found(network):
    async def main():
        async with running("nixl", on_gpu=(True, True)) as rig:

            def fault(frame, connection):
                if kind(frame) == "ready" and frame.ready.range.token_begin == 0:
                    rig.source_pool.reshape(NUM_BLOCKS, -1)[rig.source_ids[0], 5] ^= 4
                return [frame]

            rig.source.fault = fault
            with pytest.raises(errors.DigestMismatch):
                await rig.fetch(rig.ready_offer(), rig.destination())
            rig.source.cancel("k")
            await assert_still_serves(rig)

    asyncio.run(main())


def test_a_network_that_cannot_read_the_gpu_leaves_the_next_transport(network, caplog):
    network.reads_gpus = False

    async def main():
        async with running(("nixl", "tcp"), on_gpu=(True, True)) as rig:
            report = await rig.fetch(rig.ready_offer(), rig.destination())
            assert report.transport == "tcp" and rig.arrived()

    asyncio.run(main())
    assert "nixl is not offered, the network cannot read this GPU's memory: NIXL cannot use this pool" in caplog.text


@pytest.mark.parametrize(
    ("limit", "told"), [(8 << 20, "; this process may lock 8192 KiB of memory (ulimit -l), RDMA"), (-1, "")]
)
def test_what_may_be_locked_is_told_where_a_pool_cannot_be_registered(network, monkeypatch, limit, told):
    """Pods and containers have the limit of their runtime."""
    monkeypatch.setattr("resource.getrlimit", lambda what: (limit, limit))
    with pytest.raises(errors.TransferFailed, match="NIXL cannot use this pool in VRAM") as error:
        NixlAgent(Segment(0, 9, "VRAM"))
    assert (told in str(error.value)) if told else "lock" not in str(error.value)


def test_a_taker_that_cannot_have_an_agent_tries_it_once(network):
    """It took up to a second of each fetch."""
    network.reads_gpus = False

    async def main():
        async with running(("nixl", "tcp"), on_gpu=(False, True)) as rig:
            for _ in range(2):
                report = await rig.fetch(rig.ready_offer(), rig.destination())
                assert report.transport == "tcp" and rig.arrived()
                rig.source.cancel("k")
        assert len(network.agents) == 2, "the source's, and one try"

    asyncio.run(main())


def test_transfers_that_fail_are_tried_again_and_the_next_one_works(network):
    network.fails = True

    async def main():
        async with running("nixl", on_gpu=(True, True)) as rig:
            with pytest.raises(errors.TransferTimedOut):  # it is tried again until its time has passed
                await rig.fetch(rig.ready_offer(), rig.destination(), 2.0)
            rig.source.cancel("k")
            network.fails = False
            await assert_still_serves(rig)

    asyncio.run(main())


def test_a_peer_that_was_dropped_and_met_again_has_users_of_its_own(network):
    """It was taken for idle by the end of an older fetch, and removed amid the transfer of a newer one."""
    sources = [NixlAgent(Segment(0, 9)) for _ in range(nixl_engine._MAX_IDLE + 2)]
    agent, metadata = NixlAgent(Segment(0, 9)), sources[0].metadata
    failing, older = agent.open_peer(metadata), agent.open_peer(metadata)
    agent._drop_peer(failing)
    newer = agent.open_peer(metadata)
    agent.close_peer(older)
    for source in sources[1:]:
        agent.close_peer(agent.open_peer(source.metadata))
    assert metadata.decode() in network.agents[agent.metadata.decode()]._known
    for each in (failing, newer):
        agent.close_peer(each)
    assert len(agent._peers) == nixl_engine._MAX_IDLE


def test_nothing_is_read_from_a_peer_that_was_dropped(network):
    """Its bytes could land once its fetch has ended: the drop that ends its transfers has been."""
    source, agent = NixlAgent(Segment(0, 9)), NixlAgent(Segment(0, 9))
    failing, older = agent.open_peer(source.metadata), agent.open_peer(source.metadata)
    agent._drop_peer(failing)
    agent.open_peer(source.metadata)
    with pytest.raises(errors.PeerLost, match="another transfer on this connection has failed"):
        asyncio.run(agent.read(older, source.segment, np.zeros((1, 6), np.int64), 1.0))


@pytest.mark.parametrize("memory", [b"", b"VRAM", b"VRAM:-1", b"VRAM:9999", b"DRAM:0", b"DRAM\n", b"FILE"])
def test_what_is_no_memory_of_nixl_is_refused(memory):
    with pytest.raises(ValueError, match="no memory of NIXL"):
        Segment.of(0, 1, memory)
    for each in (Segment(7, 9), Segment(7, 9, "VRAM", 3)):
        assert Segment.of(7, 9, each.memory) == each
