"""A running stack with a proxy on every edge, and cases: a fault, what clients ask meanwhile, the checks afterwards."""

import asyncio
import itertools
import json
import random
import re
import time
from collections.abc import AsyncIterator, Callable, Collection, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from urllib.error import HTTPError
from urllib.request import urlopen

import grpc

from baton.v1 import inference_pb2_grpc
from tests.support.faults.checker import (
    SECRET_TEXT,
    Counters,
    check_counters,
    check_history,
    check_privacy,
    check_tables,
)
from tests.support.faults.history import Ask, History
from tests.support.faults.proxy import FaultProxy
from tests.support.faults.reference import Reference
from tests.support.observe.loads import is_idle
from tests.support.observe.probe import Probe
from tests.support.pace import patience
from tests.support.process import Process
from tests.support.redis_server import RedisServer
from tests.support.stack import SLOW_STEPS, Stack

LEASE_S = 2.0  # a fraction of the default, as are the waits of the cases
OPTIONS = ("--num-blocks", "96", "--threads", "1", "--lease-ttl-s", f"{LEASE_S:g}")
NUM_PROBES = 5
RECOVERY_TIMEOUT_S = patience(60.0)  # for what must come: a hang, if it does not
_VOCAB = 1000
_LEGEND = "\n(docs/faults.md#how says what I-1 to I-9 are)"


class ProxiedStack(Stack):
    """Gateways reach every worker through a proxy (`proxies`, by process name), and clients every gateway."""

    def __init__(self, *args, **options):
        super().__init__(*args, failpoints=True, **options)
        self.proxies: dict[str, FaultProxy] = {}

    def proxy(self, process: Process) -> FaultProxy:
        return self.proxies[process.name]

    def worker(self, address: str) -> Process:
        """Return a worker by the address that the gateway knows it by."""
        return next(process for process in self.workers if self.proxies[process.name].address == address)

    def close_proxies(self) -> None:
        for proxy in self.proxies.values():
            proxy.close()

    def _gateway_options(self) -> list[str]:
        for process in self.workers:
            self._ensure_proxy(process)
        prefill = ",".join(self.proxies[process.name].address for process in self.prefill)
        decode = ",".join(self.proxies[process.name].address for process in self.decode)
        workers = ["--decode-workers", decode, *(["--prefill-workers", prefill] if prefill else [])]
        return [*workers, *self.gateway_options]

    def _await(self, processes: list[Process]) -> None:
        super()._await(processes)
        for process in processes:
            self._ensure_proxy(process)

    def _ensure_proxy(self, process: Process) -> None:
        if process.name not in self.proxies:
            self.proxies[process.name] = FaultProxy(self.address[process.name])


class World:
    """`with World(model, folder, reference) as world`: two workers of each role unless set otherwise."""

    def __init__(
        self, model: Path, folder: Path, reference: Reference, *, redis: bool = False,
        stack_class: type[ProxiedStack] = ProxiedStack, seed: int = 0, **options,
    ):  # fmt: skip
        """`seed`: of its prompts. `options`: of the stack."""
        options = {
            "options": OPTIONS,
            "gateway_options": ("--split", "always"),
            "num_prefill": 2,
            "num_decode": 2,
        } | options
        folder.mkdir(parents=True, exist_ok=True)
        self.redis = RedisServer(folder) if redis else None
        self.redis_proxy: FaultProxy | None = None
        self.stack = stack_class(model, folder, **options)
        self.reference = reference
        self.probes: dict[str, Probe] = {}
        self.edges: list[FaultProxy] = []  # that a case has put up beside those of the stack
        self._seed = seed
        self._numbers = itertools.count(1)
        self._threads = ThreadPoolExecutor(8)

    def __enter__(self) -> "World":
        if self.redis:
            self.redis.start()
            self.redis_proxy = FaultProxy(f"127.0.0.1:{self.redis.port}")
            self.stack.gateway_options += ["--redis", f"redis://{self.redis_proxy.address}/0"]
        self.stack.__enter__()
        for process in self.stack.workers:
            self._watch(process)
        self.settled()
        return self

    def __exit__(self, *exc) -> None:
        for probe in self.probes.values():
            probe.close()
        self.stack.stop()
        self.stack.close_proxies()
        for edge in self.edges:
            edge.close()
        if self.redis:
            self.redis_proxy.close()
            self.redis.__exit__()
        self._threads.shutdown()

    def prompt(self, num_tokens: int) -> list[int]:
        """Return token ids that no other prompt begins with."""
        draw = random.Random(self._seed << 32 | next(self._numbers))
        return [5 + draw.randrange(_VOCAB) for _ in range(num_tokens)]

    @property
    def gateway(self) -> Process:
        return self.stack.gateways[0]

    def counters(self) -> Counters:
        return Counters(self.gateway.ready()["admin"])

    def pages(self) -> dict[str, str]:
        """Return all that an operator can read."""
        texts = {"a log": self.stack.text()}
        for process in self.stack.processes:
            admin = process.ready()["admin"]
            texts[f"metrics of {process.name}"] = urlopen(f"http://{admin}/metrics", timeout=10).read().decode()
        if self.redis:
            keys = self.redis.client.keys("*")
            texts["Redis"] = " ".join(key.decode("latin1") for key in keys)
        return texts

    @asynccontextmanager
    async def case(
        self, name: str, promise: str, allowed: Collection[str] = ("OK",), path: Path | None = None
    ) -> AsyncIterator["Case"]:
        """Open a case, which is checked when it is left; raises AssertionError that names every invariant that was
        broken."""
        async with grpc.aio.insecure_channel(self.stack.proxy(self.gateway).address) as channel:
            case = Case(self, name, promise, allowed, channel, path)
            try:
                yield case
                await case.check()
            finally:
                await case.end()

    # ---- processes ----

    def aside(self, work: Callable, *args) -> asyncio.Future:
        """Run it in a thread that lives as long as the world: a process dies with the thread that started it."""
        return asyncio.get_running_loop().run_in_executor(self._threads, work, *args)

    def restart(self, process: Process) -> Process:
        reborn = self.stack.restart(process)
        if process.name in self.probes:
            self.probes.pop(process.name).close()
            self._watch(reborn)
        return reborn

    def heal(self) -> list[str]:
        """Let every process run, every edge be clean and every place harmless. Returns deaths that were not ordered."""
        deaths = []
        for proxy in [*self.stack.proxies.values(), *self.edges, *([self.redis_proxy] if self.redis else [])]:
            proxy.heal()
        for process in self.stack.processes:
            process.arm("")
            if process.alive:
                process.thaw()
            elif not process.killed:
                deaths.append(f"I-6 {process.name} died by itself, status {process.popen.poll()}\n{process.tail(8)}")
        dead = [process for process in self.stack.processes if not process.alive]
        list(self._threads.map(self.restart, dead))
        return deaths

    def settled(self, timeout_s: float = 30) -> None:
        """Wait until the gateway sees every worker serve: a worker that is ready has still to be found again."""
        deadline = time.monotonic() + patience(timeout_s)
        while True:
            states = self.states()
            if len(states) == len(self.stack.workers) and set(states.values()) == {"serving"}:
                return
            assert time.monotonic() < deadline, f"I-8 not all workers serve after {timeout_s:g} s: {states}"
            time.sleep(0.05)

    def states(self) -> dict[str, str]:
        """Return the states of workers by address, as the gateway sees them; of itself where it does not answer."""
        try:
            body = urlopen(f"http://{self.gateway.ready()['admin']}/readyz", timeout=10).read()
        except HTTPError as error:  # 503: it says that it is not ready, and why
            body = error.read()
        except OSError as error:
            return {"gateway": str(error)}
        return {address: worker["state"] for address, worker in json.loads(body)["workers"].items()}

    def ledgers(self) -> list[str]:
        """Wait until every worker has all its blocks back."""
        return [
            fault for faults in self._threads.map(self._ledger_faults, list(self.probes.items())) for fault in faults
        ]

    def tables(self) -> list[str]:
        """Wait until every table of every worker is empty, as the gateway's fleet page has it."""
        deadline = time.monotonic() + LEASE_S + patience(15)
        while True:
            admin = self.gateway.ready()["admin"]
            faults = check_tables(json.loads(urlopen(f"http://{admin}/fleet.json", timeout=10).read()))
            if not faults or time.monotonic() > deadline:
                return faults
            time.sleep(0.1)

    def _ledger_faults(self, named: tuple[str, Probe]) -> list[str]:
        name, probe = named
        try:
            probe.wait_idle(LEASE_S + 15)
            return [f"I-5 {name}: {fault}" for fault in probe.faults]
        except AssertionError as error:
            return [f"I-5 {name}: {error}"]

    def _watch(self, process: Process) -> None:
        self.probes[process.name] = Probe(self.stack.address[process.name])


class Case:
    """One fault, and the requests that meet it. Made by `World.case`."""

    def __init__(self, world: World, name: str, promise: str, allowed: Collection[str], channel, path: Path | None):
        self.world, self.stack = world, world.stack
        self.name, self.promise, self.allowed = name, promise, set(allowed)
        self.stub = inference_pb2_grpc.InferenceStub(channel)
        self.history = History(f"{re.sub('[^A-Za-z0-9]', '_', name)}-{random.randrange(1 << 32):08x}", path)
        self.figures: dict[str, object] = {}
        self.gateway_is_lost = False  # and with it its counters
        self.known_words: tuple[str, ...] = ()  # of log lines that this fault explains
        self.num_complaints = len(world.stack.complaints())
        self.outcome = "not finished"
        self._before = world.counters()

    # ---- what clients do ----

    def ask(self, num_prompt: int | Sequence[int] = 200, max_tokens: int = 40, **fields) -> Ask:
        prompt = self.world.prompt(num_prompt) if isinstance(num_prompt, int) else num_prompt
        return self.history.ask(self.stub, prompt, max_tokens=max_tokens, **fields)

    def ask_many(self, count: int, num_prompt: int = 200, max_tokens: int = 40) -> list[Ask]:
        """Ask greedy and seeded requests, in turn."""
        sampled = {"temperature": 0.9, "seed": 11}
        return [self.ask(num_prompt, max_tokens, **(sampled if index % 2 else {})) for index in range(count)]

    async def ended(self, *asks: Ask, timeout_s: float = RECOVERY_TIMEOUT_S) -> None:
        """Wait for all that were asked, unless some are named."""
        tasks = [ask.task for ask in asks or self.history.asks]
        _, late = await asyncio.wait(tasks, timeout=timeout_s) if tasks else ((), ())
        assert not late, f"a hang: {len(late)} requests have not ended after {timeout_s:g} s"

    # ---- faults ----

    @contextmanager
    def slow(self, text: str = SLOW_STEPS) -> Iterator[None]:
        with self.stack.armed(text):
            yield

    async def busy(self, role: str, timeout_s: float = 20) -> Process:
        """Return the worker that has sequences, or leases out, now."""
        deadline = time.monotonic() + patience(timeout_s)
        while time.monotonic() < deadline:
            for process in getattr(self.stack, role):
                if process.alive and (load := self.world.probes[process.name].latest) and not is_idle(load):
                    return process
            await asyncio.sleep(0.01)
        raise AssertionError(f"no {role} worker is busy")

    def arm_one(self, processes: Sequence[Process], text: str) -> None:
        """Arm a failpoint that acts once, in the first process that reaches it."""
        token = self.stack.folder / "token"
        token.touch()
        for process in processes:
            process.arm(f"{text}{token}")

    async def doomed(self, *processes: Process, timeout_s: float = 30) -> Process:
        """Return the first process that a failpoint must kill."""
        deadline = time.monotonic() + patience(timeout_s)
        while time.monotonic() < deadline:
            for process in processes:
                if not process.alive:
                    process.wait_killed()
                    return process
            await asyncio.sleep(0.005)
        raise AssertionError(f"none died of {', '.join(process.name for process in processes)}")

    async def frozen(self, *processes: Process, timeout_s: float = 30) -> Process:
        deadline = time.monotonic() + patience(timeout_s)
        while time.monotonic() < deadline:
            for process in processes:
                if process.is_frozen:
                    return process
            await asyncio.sleep(0.005)
        raise AssertionError(f"none is frozen of {', '.join(process.name for process in processes)}")

    # ---- afterwards ----

    async def check(self) -> None:
        """Heal, wait for every answer, send probes, and apply the invariants. Raises AssertionError."""
        await self.ended()
        faults = await self.world.aside(self.world.heal)
        disturbed = list(self.history.asks)
        self.figures["probes_s"] = round(await self._probe(), 2)
        await self._gateway_idle()
        await self.world.aside(self.world.settled)
        faults += check_history(disturbed, self.world.reference, self.allowed, not self.gateway_is_lost)
        faults += await self.world.aside(self.world.ledgers)
        faults += await self.world.aside(self.world.tables)
        if not self.gateway_is_lost:
            faults += check_counters(self._before, self.world.counters(), self.history.asks)
        faults += [f"I-6 {line}" for line in self._complaints()]
        faults += check_privacy(await self.world.aside(self.world.pages))
        self.outcome = "kept" if not faults else faults[0].split("\n")[0]
        assert not faults, f"{self.name}: {self.promise}\n" + "\n".join(faults[:20]) + _LEGEND

    async def end(self) -> None:
        """End all processes and proxies: nothing is left for the next case."""
        for ask in self.history.asks:
            if ask.ended is None:
                ask.cancel()
        await asyncio.gather(*(ask.task for ask in self.history.asks), return_exceptions=True)
        self.history.close()
        await self.world.aside(self.world.heal)
        await self.world.aside(self.world.settled)

    def row(self) -> dict:
        counts: dict[str, int] = {}
        for ask in self.history.asks:
            counts[ask.status or "none"] = counts.get(ask.status or "none", 0) + 1
        return {"case": self.name, "promise": self.promise, "outcome": self.outcome, "requests": counts} | self.figures

    def _complaints(self) -> list[str]:
        new = self.stack.complaints()[self.num_complaints :]
        return [line for line in new if not any(word in line for word in self.known_words)]

    async def _probe(self) -> float:
        """Send requests until five in a row are answered; returns after how many seconds they were."""
        began, num_good, latest = time.monotonic(), 0, None
        while num_good < NUM_PROBES:
            assert time.monotonic() - began < RECOVERY_TIMEOUT_S, (
                f"I-8 no recovery after {RECOVERY_TIMEOUT_S:g} s: {latest.words()}"
            )
            latest = self.history.ask(self.stub, f"{SECRET_TEXT} {num_good} " * 12, max_tokens=4, timeout_s=20)
            await latest.task
            num_good = num_good + 1 if latest.status == "OK" else 0
            if latest.status != "OK":
                await asyncio.sleep(0.1)
        return time.monotonic() - began

    async def _gateway_idle(self) -> None:
        deadline = time.monotonic() + patience(20)
        while (await self.world.aside(self.world.counters)).num_running:
            assert time.monotonic() < deadline, "I-3 requests have ended for their clients, not for the gateway"
            await asyncio.sleep(0.05)
