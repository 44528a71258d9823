"""A node of a Ray cluster dies with every process on it: streams go on elsewhere, and its workers are placed again."""

import asyncio
import random

import pytest

from baton import client
from baton.cli.launch.control import RemoteLauncher
from baton.failpoints import VARIABLE
from baton.service.net.client import open_channel
from baton.service.security.tls import GATEWAY_NAME
from baton.v1 import fleet_pb2, fleet_pb2_grpc
from tests.support.client import gather, make_request
from tests.support.launch.launchers import until
from tests.support.launch.ray_cluster import RayCluster, up_on_ray
from tests.support.pace import patience
from tests.support.security.installation import API_KEY, install
from tests.support.stack import SLOW_STEPS

pytest.importorskip("ray")
pytestmark = pytest.mark.faults

_NUM_STREAMS, _NUM_TOKENS = 6, 200
_SEEN_FIRST = 10  # messages of each stream before the node dies


@pytest.fixture
def cluster(tmp_path):
    made = RayCluster(tmp_path)
    yield made
    made.close()


async def read(asked: client.AsyncClient, prompt: list[int], has_begun: asyncio.Event):
    messages = []
    async for message in asked.send(make_request(prompt, max_tokens=_NUM_TOKENS, temperature=0, ignore_eos=True)):
        messages.append(message)
        if len(messages) == _SEEN_FIRST:
            has_begun.set()
    return gather(messages)


async def all_joined(target: str, access, num_workers: int) -> None:
    """Wait until as many workers serve at the gateway, which is ready before: a prefill worker stands in."""
    async with open_channel(target, access) as channel, asyncio.timeout(patience(60)):
        stub = fleet_pb2_grpc.FleetStub(channel)
        while True:
            listed = await stub.ListWorkers(fleet_pb2.ListWorkersRequest(), timeout=patience(10))
            if sum(view.state == "serving" for view in listed.workers) == num_workers:
                return
            await asyncio.sleep(0.1)


async def decoding_on(target: str, access, address: str) -> int:
    """Return how many requests run on a decode worker."""
    async with open_channel(target, access) as channel:
        listed = await fleet_pb2_grpc.FleetStub(channel).ListRequests(fleet_pb2.ListRequestsRequest(), timeout=10)
    return sum(view.decode == address for view in listed.running)


async def test_streams_go_on_and_the_place_is_filled_again(cluster, model, reference, tmp_path):
    made = install(tmp_path / "certs", "--host", cluster.host)
    operator = made.access("operator")
    env = {VARIABLE: SLOW_STEPS}
    with up_on_ray(cluster, model, made.folder, tmp_path / "up", "--decode", "2", env=env) as (up, ready):
        launcher = RemoteLauncher(ready["control"], operator)
        before = await launcher.list()
        await all_joined(ready["fleet"], operator, len(before))
        victim = next(each for each in before if each.role == "decode" and not each.where.endswith(cluster.head))
        prompts = [random.Random(seed).choices(range(10, 200), k=80) for seed in range(_NUM_STREAMS)]
        begun = [asyncio.Event() for _ in prompts]
        access = made.access(key=API_KEY).for_client() | {"tls_server_name": GATEWAY_NAME}
        async with client.AsyncClient(ready["grpc"], **access) as asked:
            reading = [
                asyncio.create_task(read(asked, prompt, each)) for prompt, each in zip(prompts, begun, strict=True)
            ]
            await asyncio.gather(*(each.wait() for each in begun))
            assert await decoding_on(ready["fleet"], operator, victim.address), "something runs there"
            await asyncio.to_thread(cluster.kill_node_of, victim.address)
            replies = await asyncio.gather(*reading)
        for prompt, reply in zip(prompts, replies, strict=True):
            expected = reference.tokens(prompt, _NUM_TOKENS, {"temperature": 0})
            assert reply.choices[0].token_ids == expected[0], "no token is lost, repeated or changed"

        def is_whole(workers) -> bool:
            serving = [each.role for each in workers if each.state == "serving" and each.where != victim.where]
            return sorted(serving) == ["decode", "decode", "prefill"]

        after = await until(launcher, is_whole, "every place is filled on the nodes that are left")
        assert {each.name for each in after} == {each.name for each in before}
        assert "neither it nor its node answers" in up.text() or "its actor is gone" in up.text()
