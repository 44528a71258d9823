"""A process of clients for bench/gateway.py: python -m bench.processes.gateway_client TARGET,... WHAT NUMBER SECONDS
OUTPUT.

WHAT is `rate` (NUMBER requests/s, open loop), `closed` (NUMBER concurrent streams) or `held` (NUMBER streams that stay
open for SECONDS). Prints one JSON object: times are monotonic seconds, tokens are (step modulo, time)."""

import asyncio
import json
import random
import sys
import time
from collections.abc import Awaitable, Callable
from dataclasses import asdict, dataclass, field

import grpc
import uvloop

from baton.v1 import inference_pb2 as pb
from baton.v1 import inference_pb2_grpc

PROMPT = 256
MAX_CALLS = 64  # streams of one connection
# concurrent calls: a larger burst takes memory that is not theirs, and gRPC would cancel some beyond 1,000
AT_ONCE = 50


@dataclass
class Seen:
    ttft_s: list[float] = field(default_factory=list)
    refused_s: list[float] = field(default_factory=list)
    arrivals: list[tuple[int, float]] = field(default_factory=list)  # token id, and when its message came
    num_messages: int = 0
    num_tokens: int = 0
    failed: list[str] = field(default_factory=list)
    steady: tuple[float, float] = (0.0, 0.0)  # while the maximum of streams was open (closed)


async def closed_loop(
    num_streams: int, seconds: float, output: int, seen: Seen, one: Callable[[int, int], Awaitable[None]]
) -> None:
    """Run concurrent streams, each by one(index, tokens). They begin one after the other and have different lengths,
    with mean `output`, so that no two rounds coincide."""
    begun, rng = time.monotonic(), random.Random(0)
    until, ramp_s = begun + seconds, seconds / 4
    seen.steady = begun + ramp_s, until

    async def work(place: int) -> None:
        await asyncio.sleep(ramp_s * place / num_streams)
        while time.monotonic() < until and not seen.failed:
            await one(place, rng.randint(output // 2, output * 3 // 2))

    await asyncio.gather(*map(work, range(num_streams)))


class Clients:
    def __init__(self, targets: list[str], num_streams: int, output: int):
        num_channels = max(len(targets), -(-num_streams // MAX_CALLS))
        # Without its own subchannel pool, every channel to one target would share one connection.
        options = (("grpc.use_local_subchannel_pool", 1),)
        self._channels = [grpc.aio.insecure_channel(targets[n % len(targets)], options) for n in range(num_channels)]
        self._stubs = [inference_pb2_grpc.InferenceStub(channel) for channel in self._channels]
        self._rng = random.Random(0)
        self._output = output
        self._num_sent = 0
        self.seen = Seen()

    async def one(self, output: int) -> None:
        seen, stub = self.seen, self._stubs[self._num_sent % len(self._stubs)]
        self._num_sent += 1
        request = pb.GenerateRequest(
            token_ids=pb.TokenIds(ids=[self._rng.randrange(5, 4096) for _ in range(PROMPT)]),
            sampling=pb.Sampling(temperature=0.0),
            stopping=pb.Stopping(max_tokens=output, ignore_eos=True),
        )
        begun, is_first = time.monotonic(), True
        try:
            async for message in stub.Generate(request, timeout=900):
                at = time.monotonic()
                if is_first:
                    seen.ttft_s.append(at - begun)
                    is_first = False
                seen.num_messages += 1
                seen.num_tokens += len(message.token_ids)
                seen.arrivals.extend((token_id, at) for token_id in message.token_ids)
        except grpc.aio.AioRpcError as error:
            if error.code() is grpc.StatusCode.RESOURCE_EXHAUSTED:
                seen.refused_s.append(time.monotonic() - begun)
            else:
                seen.failed.append(f"{error.code().name}: {error.details()}")

    async def rate(self, per_s: float, seconds: float) -> None:
        """Send by a Poisson process, regardless of earlier requests."""
        until, at, tasks = time.monotonic() + seconds, time.monotonic(), []
        while (at := at + self._rng.expovariate(per_s)) < until:
            await asyncio.sleep(max(0.0, at - time.monotonic()))
            tasks.append(asyncio.create_task(self.one(self._output)))
        await asyncio.gather(*tasks)

    async def closed(self, num_streams: int, seconds: float) -> None:
        await closed_loop(num_streams, seconds, self._output, self.seen, lambda _, output: self.one(output))

    async def held(self, num_streams: int, seconds: float) -> None:
        """Open streams, wait for the first message of each, and leave them open. Exits if one cannot be opened."""
        tasks = []
        while len(self.seen.ttft_s) < num_streams:
            if self.seen.failed or self.seen.refused_s:
                sys.exit(self.seen.failed[0] if self.seen.failed else "a stream was refused")
            num_more = min(num_streams, len(self.seen.ttft_s) + AT_ONCE) - len(tasks)
            tasks += [asyncio.create_task(self.one(self._output)) for _ in range(num_more)]
            await asyncio.sleep(0.05)
        print("open", flush=True)
        await asyncio.sleep(seconds)
        num_failed = len(self.seen.failed)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        del self.seen.failed[num_failed:]  # ended by us


async def main(targets: str, what: str, number: str, seconds: str, output: str) -> None:
    clients = Clients(targets.split(","), int(float(number)), int(output))
    await getattr(clients, what)(float(number) if what == "rate" else int(number), float(seconds))
    print(json.dumps(asdict(clients.seen)), flush=True)


if __name__ == "__main__":
    uvloop.install()
    asyncio.run(main(*sys.argv[1:]))
