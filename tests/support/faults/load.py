"""A load whose answers are known: many clients at once, some of which cancel, each answer judged as it ends."""

import asyncio
import random
from collections import Counter

from baton.v1 import inference_pb2_grpc
from tests.support.faults.checker import SECRET_TEXT, check_history
from tests.support.faults.history import Ask, History
from tests.support.faults.world import World

CANCELLED = 0.1
NEW_PROMPTS = 0.1
_SAMPLINGS = ({}, {"temperature": 0.9, "seed": 11})


class Load:
    """Belongs to one event loop. What has ended is judged and forgotten."""

    def __init__(self, world: World, channel, seed: int, *, num_prompts: int = 32, max_tokens: int = 60):
        self.world, self.max_tokens = world, max_tokens
        self.stub = inference_pb2_grpc.InferenceStub(channel)
        self.history = History(f"load-{seed}")
        self.statuses: Counter[str] = Counter()
        self.faults: list[str] = []
        self.num_wrong = self.num_failed = self.num_tokens = self.num_hit = self.num_exact = 0
        self.gaps: list[float] = []  # the longest pause of each answer that was hit
        self._hit: set[str] = set()
        self._random = random.Random(seed)
        self._prompts = [world.prompt(length) for length in (20, 64, 100, 130, 200, 300) * num_prompts][:num_prompts]
        self._clients: list[asyncio.Task] = []
        self._wanted = 0
        for prompt in self._prompts:
            for sampling in _SAMPLINGS:
                world.reference.tokens(prompt, max_tokens, {"temperature": 0.0, **sampling})

    def scale(self, num_clients: int) -> None:
        """Run `num_clients` at once from now on; those that are too many stop after their answer."""
        self._wanted = num_clients
        self._clients = [client for client in self._clients if not client.done()]
        for index in range(len(self._clients), num_clients):
            self._clients.append(asyncio.create_task(self._client(index)))

    async def stop(self, timeout_s: float = 120) -> None:
        """Wait for all answers. Raises AssertionError when an answer does not end."""
        self.scale(0)
        _, late = await asyncio.wait(self._clients, timeout=timeout_s) if self._clients else ((), ())
        assert not late, f"a hang: {len(late)} clients wait after {timeout_s:g} s"
        for client in self._clients:
            client.result()

    def hit(self) -> int:
        """Say that a fault is about to come: everything that runs and has a token counts as hit by it."""
        running = {ask.request_id for ask in self.history.asks if ask.tokens and not ask.was_cancelled}
        self._hit |= running
        return len(running)

    async def probe(self) -> Ask:
        """Ask something small, and wait for its end."""
        ask = self.history.ask(self.stub, f"{SECRET_TEXT} " * 10, max_tokens=4, timeout_s=60)
        await ask.task
        self._judge(ask)
        return ask

    async def _client(self, index: int) -> None:
        draw = random.Random(self._random.randrange(1 << 40))
        while index < self._wanted:
            prompt = (
                self.world.prompt(draw.choice((30, 150))) if draw.random() < NEW_PROMPTS else draw.choice(self._prompts)
            )
            ask = self.history.ask(
                self.stub, prompt, max_tokens=draw.randint(1, self.max_tokens), timeout_s=60, **draw.choice(_SAMPLINGS)
            )
            if draw.random() < CANCELLED:
                asyncio.get_running_loop().call_later(draw.uniform(0, 0.5), ask.cancel)
            await asyncio.wait([ask.task])
            self._judge(ask)
            if ask.status not in ("OK", "CANCELLED"):
                await asyncio.sleep(min(1.0, ask.retry_after_s or 0.2) * draw.uniform(0.5, 1.5))

    def _judge(self, ask: Ask) -> None:
        """Count an answer. Failed is anything but an answer, our own cancel, or an honest refusal."""
        self.history.asks.remove(ask)
        self.statuses[ask.status] += 1
        self.num_tokens += ask.num_tokens
        faults = check_history([ask], self.world.reference, ("OK", "RESOURCE_EXHAUSTED"))
        self.faults += faults
        self.num_wrong += any("I-1" in fault or "I-2" in fault for fault in faults)
        self.num_failed += any("I-4" in fault for fault in faults)
        if ask.request_id in self._hit and not ask.was_cancelled:
            self._hit.discard(ask.request_id)
            self.num_hit += 1
            self.num_exact += ask.status == "OK" and not faults
            self.gaps.append(ask.gap_s)
