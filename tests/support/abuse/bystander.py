"""Callers that must not be affected: a quiet tenant, a health probe, an operator, on open connections and on new
ones."""

import asyncio
import contextlib
import statistics
import time
from collections import defaultdict
from collections.abc import Awaitable, Callable

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

from baton.service.security.access import Access
from baton.v1 import fleet_pb2, fleet_pb2_grpc, inference_pb2_grpc
from tests.support.client import make_request

GENERATES = "Generate", "Generate, new connection"
_FRESH = (("grpc.use_local_subchannel_pool", 1),)  # a connection of its own
_LONG = "The quick brown fox jumps over the lazy dog. " * 48  # over 2,048 characters: read in a thread


class Bystander:
    """`async with`: asks, round by round, until the block is left. `faults`: what it was refused, or not answered in
    time."""

    def __init__(self, target: str, fleet: str, pages: list[str], tenant: Access, operator: Access, deadline_s: float):
        self._target, self._fleet, self._pages = target, fleet, pages
        self._tenant, self._operator, self._deadline_s = tenant, operator, deadline_s
        self._tick = asyncio.Condition()
        self.num_rounds = 0
        self.faults: list[str] = []
        self.times_s: dict[str, list[float]] = defaultdict(list)

    async def __aenter__(self) -> "Bystander":
        self._exits = contextlib.AsyncExitStack()
        self._standing = await self._exits.enter_async_context(self._tenant.channel(self._target, _FRESH))
        self._fleet_channel = await self._exits.enter_async_context(self._operator.channel(self._fleet, _FRESH))
        self._asking = asyncio.create_task(self._ask_rounds())
        await self._wait_for_round(1)
        return self

    async def __aexit__(self, *exc) -> None:
        self._asking.cancel()
        await asyncio.gather(self._asking, return_exceptions=True)
        await self._exits.aclose()

    async def rounds(self, count: int) -> None:
        """Wait for `count` rounds that begin from now on."""
        await self._wait_for_round(self.num_rounds + count + 1)

    async def _wait_for_round(self, num_rounds: int) -> None:
        async with self._tick:
            await self._tick.wait_for(lambda: self.num_rounds >= num_rounds or self._asking.done())
        if self._asking.done():
            self._asking.result()

    def worst(self, part: str) -> float:
        return max(self.times_s[part], default=0.0)

    def median(self, part: str) -> float:
        return statistics.median(self.times_s[part])

    async def _ask_rounds(self) -> None:
        while True:
            await self._timed(GENERATES[0], self._generate(self._standing, "Hello"))
            await self._timed(GENERATES[1], self._anew(self._target, lambda new: self._generate(new, _LONG)))
            await self._timed("Check", self._anew(self._target, self._check))
            await self._timed("ListWorkers", self._list_workers())
            for address in self._pages:
                await self._timed("readyz", self._readyz(address))
            async with self._tick:
                self.num_rounds += 1
                self._tick.notify_all()

    async def _timed(self, part: str, call: Awaitable[str]) -> None:
        began = time.monotonic()
        try:
            async with asyncio.timeout(self._deadline_s + 1):
                fault = await call
        except grpc.aio.AioRpcError as error:
            fault = f"{error.code().name}: {error.details()}"
        except (OSError, TimeoutError, asyncio.IncompleteReadError) as error:
            fault = f"{type(error).__name__}: {error}"
        took = time.monotonic() - began
        self.times_s[part].append(took)
        if fault:
            self.faults.append(f"{part} after {took:.1f} s: {fault}")

    async def _anew(self, target: str, call: Callable[[grpc.aio.Channel], Awaitable[str]]) -> str:
        async with self._tenant.channel(target, _FRESH) as channel:
            return await call(channel)

    async def _generate(self, channel: grpc.aio.Channel, text: str) -> str:
        request = make_request(text, max_tokens=4, temperature=0.0, ignore_eos=True)
        stub = inference_pb2_grpc.InferenceStub(channel)
        told = [each async for each in stub.Generate(request, timeout=self._deadline_s, metadata=self._tenant.metadata)]
        num = sum(len(each.token_ids) for each in told)
        return "" if num == 4 else f"{num} tokens of 4"

    async def _check(self, channel: grpc.aio.Channel) -> str:
        stub = health_pb2_grpc.HealthStub(channel)
        answer = await stub.Check(health_pb2.HealthCheckRequest(), timeout=self._deadline_s)
        return "" if answer.status == health_pb2.HealthCheckResponse.SERVING else f"status {answer.status}"

    async def _list_workers(self) -> str:
        stub = fleet_pb2_grpc.FleetStub(self._fleet_channel)
        answer = await stub.ListWorkers(fleet_pb2.ListWorkersRequest(), timeout=self._deadline_s)
        states = [each.state for each in answer.workers]
        return "" if set(states) == {"serving"} else f"workers are {states}"

    async def _readyz(self, address: str) -> str:
        reader, writer = await asyncio.open_connection(*address.rsplit(":", 1))
        try:
            writer.write(b"GET /readyz HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n")
            first = await reader.readline()
        finally:
            writer.close()
        return "" if b" 200 " in first else f"{address} says {first[:60]!r}"
