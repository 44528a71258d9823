"""What a link says of a worker that has gone: its name, why, and nothing that was of its session."""

import logging

import pytest

from baton.v1 import worker_pb2 as pb
from gateway.link.worker_link import LinkState
from gateway.observe.gauges import fleet_gauges


@pytest.mark.parametrize(
    "state, level, words", [("serving", "WARNING", "worker lost"), ("draining", "INFO", "worker left")]
)
async def test_a_worker_that_is_gone_keeps_its_name_and_no_clock(cluster, caplog, state, level, words):
    """One that drains goes as somebody wanted."""
    caplog.set_level(logging.INFO)
    async with cluster() as c:
        (worker,), (link,) = c.decode, c.gateway.registry.decode
        worker.state = state
        link.clock.compare(pb.Load(beat_sent_ns=1, wall_time_ns=1))
        clocks = [each for each in fleet_gauges(c.gateway.registry, c.gateway.index) if each.labels == ("worker",)]
        assert [list(each.read()) for each in clocks] == [[link.address]] * 2
        await c.until(lambda: link.state is LinkState(state))
        await worker.stop()
        await c.until(lambda: link.hello is None)
        assert [each.read() for each in clocks] == [{}, {}]
        await c.until(lambda: link.num_failed_sessions > 0)  # it is looked for again, in vain
        assert link.state.value == ("left" if state == "draining" else "connecting")
        assert link.reason.startswith("it drained") == (state == "draining") and link.load == pb.Load()
        name = worker.instance.hex()[:8]
        assert link.name == name
        (gone,) = [
            each for each in caplog.records if f"worker={name}" in each.getMessage() and "joined" not in each.msg
        ]
        assert (gone.levelname, gone.getMessage().partition(" worker=")[0]) == (level, words)
        c.workers.remove(worker)
