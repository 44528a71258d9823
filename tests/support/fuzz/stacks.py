"""A stack of real processes by a plan: what clients ask and how they behave, and what happens to workers and Redis
meanwhile. Every answer is that of one engine that is asked alone; afterwards nothing is held and no process has died.

{"seed": 3, "kind": "stack", "num_clients": 8,
 "requests": [{"id": "q0", "shape": "ids", "length": 130, "max_tokens": 20, "n": 1, "sampling": {...}, ...}, ...],
 "faults": [[40, "kill", 1, 300], ...]}

A fault comes when that many requests have ended: (when, what, to which worker, milliseconds until it is undone).
"""

import asyncio
import json
import random
import re
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from urllib.request import urlopen

import grpc
from tokenizers import Tokenizer

from baton.v1 import inference_pb2 as pb
from baton.v1 import inference_pb2_grpc, worker_pb2, worker_pb2_grpc
from tests.support import bare_engine
from tests.support.client import make_request, read_error
from tests.support.faults.reference import Reference
from tests.support.faults.world import World
from tests.support.fork_server.processes import ForkServerStack
from tests.support.fuzz.shrink import Plan
from tests.support.models import EOS_IDS
from tests.support.observe.loads import HELD
from tests.support.pace import patience
from tests.support.process import Process

# Two workers of each role, as unlike as they may be: (block size, blocks, context).
UNLIKE = ((16, 160, 1024), (64, 40, 640), (32, 80, 1024), (128, 12, 640))
OPTIONS = ("--threads", "1", "--lease-ttl-s", "2", "--max-num-seqs", "16", "--max-num-batched-tokens", "160")
FAULTS = (
    "kill", "kill", "kill", "freeze", "freeze", "reset", "reset", "drain", "role", "redis flush", "redis flush",
    "redis kill",
)  # fmt: skip
SAMPLINGS = (
    {}, {}, {"temperature": 0.9}, {"temperature": 0.8, "top_k": 20, "top_p": 0.9},
    {"repetition_penalty": 1.2, "frequency_penalty": 0.3},
)  # fmt: skip
WORDS = (
    "the quick brown fox",
    "Größe und façade",
    "東京",
    "🙂🙂",
    "def f(x):\n    return x",
    "0 1 2 3 4 5",
    "lorem ipsum",
)
REQUEST_TIMEOUT_S = patience(90.0)
MAX_TRIES = 4  # of requests refused because all workers are busy
IDLE_S = 20.0
_METRIC = re.compile(r"^baton_(running|waiting|kv_blocks)({[^}]*}) (\S+)$", re.MULTILINE)
_AT_REST = re.compile(r'holder="(free|cached)"')


def stack_plan(seed: int, num_requests: int = 250, num_faults: int = 6) -> Plan:
    """Return a plan with one fault in some forty requests: workers come back meanwhile."""
    draw = random.Random(seed)
    faults = [
        [draw.randrange(num_requests), draw.choice(FAULTS), draw.randrange(4), draw.choice((0, 100, 300, 1500))]
        for _ in range(num_faults)
    ]
    return {
        "seed": seed, "kind": "stack", "num_clients": draw.choice((4, 8, 16)), "faults": sorted(faults),
        "requests": [_request(draw, seed, index) for index in range(num_requests)],
    }  # fmt: skip


def _request(draw: random.Random, seed: int, index: int) -> Plan:
    wish = {
        "id": f"q{seed}-{index}", "shape": draw.choice(("ids", "ids", "text", "chat")), "gateway": draw.randrange(2),
        "shared": draw.choice((0, 0, 64, 130, 200)), "own": draw.choice((1, 10, 64, draw.randint(1, 150))),
        "max_tokens": draw.choice((1, 4, draw.randint(1, 30), draw.randint(1, 60))), "n": draw.choice((1, 1, 1, 2, 3)),
        "sampling": draw.choice(SAMPLINGS), "ignore_eos": int(draw.random() < 0.7),
    }  # fmt: skip
    if draw.random() < 0.2:
        wish["logprobs"] = draw.choice((0, 2))
    if draw.random() < 0.15:
        wish["stop"] = draw.choice(("e", "the", "\n", "zq", " a"))
    behaviour = draw.random()
    if behaviour < 0.08:
        wish["cancel_after"] = draw.choice((0, 1, 10))
    elif behaviour < 0.14:
        wish["slow_ms"] = draw.choice((20, 100))
    elif behaviour < 0.22:
        wish["resume_after"] = draw.choice((1, 5))
    return wish


@dataclass(eq=False)
class Seen:
    """The messages that a client saw of one request."""

    wish: Plan
    tokens: dict[int, list[int]] = field(default_factory=dict)
    texts: dict[int, str] = field(default_factory=dict)
    logprobs: dict[int, list[tuple]] = field(default_factory=dict)
    reasons: dict[int, str] = field(default_factory=dict)
    stops: dict[int, str] = field(default_factory=dict)
    seed: int | None = None
    status: str = ""
    details: str = ""
    num_tries: int = 0

    @property
    def num_tokens(self) -> int:
        return sum(map(len, self.tokens.values()))

    def take(self, message: pb.GenerateResponse) -> None:
        index = message.index
        assert index not in self.reasons or message.HasField("usage"), "a message after the end of its choice"
        self.tokens.setdefault(index, []).extend(message.token_ids)
        self.texts[index] = self.texts.get(index, "") + message.text
        self.logprobs.setdefault(index, []).extend(
            (each.chosen.token_id, each.chosen.logprob, tuple((best.token_id, best.logprob) for best in each.top))
            for each in message.logprobs
        )
        if message.finish_reason:
            self.reasons[index] = pb.FinishReason.Name(message.finish_reason).removeprefix("FINISH_REASON_")
            self.stops[index] = message.matched_stop
        if message.HasField("seed"):
            self.seed = message.seed


class FuzzStack(ForkServerStack):
    """Every worker has options of its own."""

    def __init__(self, *args, **options):
        super().__init__(*args, **options)
        self._plans = [
            (
                name,
                module,
                [*given, "--block-size", f"{size}", "--num-blocks", f"{num}", "--max-model-len", f"{length}"],
            )
            for (name, module, given), (size, num, length) in zip(self._plans, UNLIKE, strict=True)
        ]


class Stacks:
    """`with Stacks(model, folder) as stacks`: one stack for many plans."""

    def __init__(self, model: Path, folder: Path, stack_class: type[FuzzStack] = FuzzStack, run_class=None):
        """`run_class`: a Run that knows further faults."""
        reference = Reference(model)
        self._world = World(
            model, folder, reference, redis=True, stack_class=stack_class, options=OPTIONS, num_gateways=2,
            gateway_options=("--split", "auto"),
        )  # fmt: skip
        self._oracle, self._run_class = Oracle(model, reference), run_class or Run

    def __enter__(self) -> "Stacks":
        self._world.__enter__()
        self._runner = asyncio.Runner()
        self._runner.__enter__()
        return self

    def __exit__(self, *exc) -> None:
        self._runner.__exit__(*exc)
        self._world.__exit__(*exc)

    def obey(self, plan: Plan) -> Counter[str]:
        return self._runner.run(self._run_class(self._world, self._oracle, plan).run())


class Run:
    """One plan on a running stack."""

    def __init__(self, world: World, oracle: "Oracle", plan: Plan):
        self._world, self._stack, self._oracle, self._plan = world, world.stack, oracle, plan
        self._seen: list[Seen] = []
        self._counts: Counter[str] = Counter()
        self._complaints = len(world.stack.complaints())

    async def run(self) -> Counter[str]:
        gateways = [process.ready()["grpc"] for process in self._stack.gateways]
        channels = [grpc.aio.insecure_channel(address) for address in gateways]
        self._stubs = [inference_pb2_grpc.InferenceStub(channel) for channel in channels]
        wishes = iter(self._plan["requests"])
        try:
            faults = asyncio.create_task(self._faults())
            await asyncio.gather(*(self._client(wishes) for _ in range(max(1, self._plan["num_clients"]))))
            self._over = True
            await faults
            deaths = await self._world.aside(self._world.heal)
            await self._world.aside(self._world.settled)
            assert not deaths, deaths[0]
            for seen in self._seen:
                await self._judge(seen)
            await self._world.aside(self._check_empty)
        finally:
            await self._world.aside(self._world.heal)
            for channel in channels:
                await channel.close()
        complaints = self._stack.complaints()[self._complaints :]
        assert not complaints, complaints[0]
        return self._counts

    # ---- clients ----

    async def _client(self, wishes) -> None:
        for wish in wishes:
            seen = Seen(wish)
            await asyncio.wait_for(self._ask(seen), 2 * REQUEST_TIMEOUT_S)
            self._seen.append(seen)

    async def _ask(self, seen: Seen) -> None:
        """Ask until it is answered, or not refused because all are busy."""
        gateway, pause_s = seen.wish["gateway"], 0.0
        while seen.num_tries < MAX_TRIES:
            await asyncio.sleep(pause_s)
            seen.num_tries += 1
            try:
                again = await self._read(seen, self._stubs[gateway])
            except grpc.aio.AioRpcError as error:
                seen.status, seen.details = error.code().name, str(error.details())
                if seen.status != "RESOURCE_EXHAUSTED" or seen.num_tokens:
                    return
                pause_s = (read_error(error).retry_after_s or 0.2) * seen.num_tries
                continue
            if not again:
                return
            gateway, seen.wish = 1 - gateway, {**seen.wish, "resume_after": 0}
            seen.reasons.clear()  # what has ended says so again

    async def _read(self, seen: Seen, stub) -> bool:
        """Return whether it continues behind what is here, after a line that was lost."""
        wish = seen.wish
        call = stub.Generate(self._message(seen), timeout=REQUEST_TIMEOUT_S)
        cancel_after, resume_after = wish.get("cancel_after"), wish.get("resume_after") or None
        if cancel_after == 0:
            call.cancel()
            seen.status = "CANCELLED"
            return False
        async for message in call:
            seen.take(message)
            if cancel_after is not None and seen.num_tokens >= cancel_after:
                call.cancel()
                seen.status = "CANCELLED"
                return False
            if resume_after is not None and seen.num_tokens >= resume_after and not message.HasField("usage"):
                call.cancel()
                return True
            await asyncio.sleep(wish.get("slow_ms", 0) / 1e3)
        seen.status = "OK"
        return False

    def _message(self, seen: Seen) -> pb.GenerateRequest:
        wish, options = seen.wish, dict(seen.wish["sampling"])
        if "logprobs" in wish:
            options["logprobs"] = wish["logprobs"]
        if "stop" in wish:
            options["stop"] = [wish["stop"]]
        if options.get("temperature"):
            options["seed"] = _number(wish["id"])
        resume = {}
        if seen.seed is not None:
            options["seed"] = seen.seed
            resume["resume_from"] = [len(seen.tokens.get(choice, ())) for choice in range(max(1, wish["n"]))]
        return make_request(
            _prompt(self._plan["seed"], wish), request_id=wish["id"], max_tokens=max(1, wish["max_tokens"]),
            n=max(1, wish["n"]), ignore_eos=bool(wish["ignore_eos"]), **options, **resume,
        )  # fmt: skip

    # ---- faults ----

    async def _faults(self) -> None:
        self._over = False
        for when, what, which, ms in self._plan["faults"]:
            while len(self._seen) < when and not self._over:
                await asyncio.sleep(0.01)
            process = self._stack.workers[which]
            await getattr(self, "_" + what.replace(" ", "_"))(process, ms / 1e3)
            self._counts["faults"] += 1
            await self._world.aside(self._world.settled)

    async def _kill(self, process: Process, pause_s: float) -> None:
        process.kill()
        await asyncio.sleep(pause_s)
        await self._world.aside(self._world.restart, process)

    async def _freeze(self, process: Process, pause_s: float) -> None:
        process.freeze()
        await asyncio.sleep(pause_s)
        process.thaw()

    async def _reset(self, process: Process, pause_s: float) -> None:
        self._stack.proxy(process).reset()

    async def _drain(self, process: Process, pause_s: float) -> None:
        process.terminate()
        await self._world.aside(process.wait, 60)
        process.killed = True
        await self._world.aside(self._world.restart, process)

    async def _role(self, process: Process, pause_s: float) -> None:
        """Give a worker the other role, then its own."""
        roles = ("decode", "prefill") if process in self._stack.prefill else ("prefill", "decode")
        for role in roles:
            async with grpc.aio.insecure_channel(self._stack.address[process.name]) as channel:
                stub = worker_pb2_grpc.WorkerStub(channel)
                await stub.Drain(worker_pb2.DrainRequest(next_role=role, grace_s=1.0), timeout=10)
                await self._becomes(stub, role)
            await self._world.aside(self._world.settled)

    async def _becomes(self, stub, role: str) -> None:
        deadline = time.monotonic() + patience(60)
        while time.monotonic() < deadline:
            try:
                hello = await stub.Describe(worker_pb2.DescribeRequest(), timeout=2)
                if list(hello.roles) == [role]:
                    return
            except grpc.aio.AioRpcError:
                pass  # between its two lives
            await asyncio.sleep(0.05)
        raise AssertionError(f"a worker that was to be a {role} worker is none after 60 s")

    async def _redis_flush(self, process: Process, pause_s: float) -> None:
        await self._world.aside(self._world.redis.client.flushall)

    async def _redis_kill(self, process: Process, pause_s: float) -> None:
        self._world.redis.kill()
        await asyncio.sleep(pause_s)
        await self._world.aside(self._world.redis.start)

    # ---- afterwards ----

    async def _judge(self, seen: Seen) -> None:
        self._counts["requests"] += 1
        self._counts[seen.status] += 1
        words = f"{seen.wish['id']} {seen.status} {seen.details}"
        assert seen.status in ("OK", "CANCELLED", "RESOURCE_EXHAUSTED"), f"not answered: {words}"
        if not seen.num_tokens:
            return
        prompt = _prompt(self._plan["seed"], seen.wish)
        if not isinstance(prompt[0], int):
            prompt = await self._tokenized(prompt)
        wholes = self._oracle.wholes(seen.wish, prompt, seen.seed)
        for choice, whole in enumerate(wholes):
            made = seen.tokens.get(choice, [])
            assert made == whole.token_ids[: len(made)], f"wrong tokens: {words}: {made}, alone {whole.token_ids}"
            told = seen.logprobs.get(choice, [])
            assert told == whole.logprobs[: len(told)], f"wrong logprobs: {words}"
            if seen.status == "OK":
                self._oracle.check_end(seen, choice, whole)

    async def _tokenized(self, prompt) -> list[int]:
        if isinstance(prompt, str):
            request = pb.TokenizeRequest(text=prompt)
        else:
            messages = [pb.Message(role=role, content=content) for role, content in prompt]
            request = pb.TokenizeRequest(messages=pb.Messages(messages=messages))
        return list((await self._stubs[0].Tokenize(request, timeout=30)).token_ids)

    def _check_empty(self) -> None:
        """Wait until, by what operators read, blocks, keys and requests are back to nothing."""
        deadline = time.monotonic() + patience(IDLE_S)
        while held := self._held():
            assert time.monotonic() < deadline, f"still held: {held}"
            time.sleep(0.1)

    def _held(self) -> dict:
        """Return what is held, as the page for operators and each process have it."""
        found = {}
        for gateway in self._stack.gateways:
            page = json.loads(_page(gateway, "fleet.json"))
            for worker in page["workers"]["workers"]:
                load = worker["load"]
                told = {name: load[name] for name in ("num_running", "num_waiting", "num_waiting_tokens")}
                told |= {"num_legs": worker["num_legs"], "blocks": sum(load["blocks_by_holder"][: len(HELD)])}
                found |= {(gateway.name, worker["address"], name): count for name, count in told.items() if count}
            if running := page["requests"].get("running"):
                found[gateway.name, "requests"] = len(running)
        for process in self._stack.processes:
            for name, labels, value in _METRIC.findall(_page(process, "metrics")):
                if float(value) and (name != "kv_blocks" or not _AT_REST.search(labels)):
                    found[process.name, name, labels] = value
        return found


def _page(process: Process, name: str) -> str:
    """Return the page of a process's admin port, which is another one in another role."""
    admin = re.findall(r"^ready .*?\badmin=(\S+)", process.out.read_text(), re.MULTILINE)[-1]
    return urlopen(f"http://{admin}/{name}", timeout=10).read().decode()


class Oracle:
    """What a client may have seen of a request, by an engine in this process that is asked alone."""

    def __init__(self, model: Path, reference: Reference):
        self._reference = reference
        self._tokenizer = Tokenizer.from_file(str(model / "tokenizer.json"))

    def wholes(self, wish: Plan, prompt: Sequence[int], seed: int | None) -> list[bare_engine.BareChoice]:
        """Return the whole answer of every choice, without stop strings."""
        options = {"temperature": 0.0, "n": max(1, wish["n"]), "seed": seed or 0, **wish["sampling"]}
        if "logprobs" in wish:
            options["logprobs"] = wish["logprobs"]
        eos_ids = () if wish["ignore_eos"] else EOS_IDS
        choices = self._reference.choices(prompt, max(1, wish["max_tokens"]), options, eos_ids)
        return [choices[index] for index in sorted(choices)]

    def check_end(self, seen: Seen, choice: int, whole: bare_engine.BareChoice) -> None:
        """Check that it is all there, and no more than its stop string lets through."""
        words, stop = f"choice {choice} of {seen.wish['id']}", seen.wish.get("stop")
        text = self._tokenizer.decode(whole.token_ids, skip_special_tokens=True)
        if stop and seen.stops.get(choice) == stop:
            assert stop in text, f"stopped at what is not there: {words}"
            if seen.wish.get("resume_after") != 0:  # of a stream that was resumed the text is not whole
                assert seen.texts[choice] == text[: text.index(stop)], f"cut at the wrong place: {words}"
            return
        assert not (stop and stop in text), f"a stop string was passed over: {words}"
        assert seen.tokens.get(choice, []) == whole.token_ids, f"cut short: {words}"
        assert seen.reasons.get(choice) == whole.finish_reason, f"another reason to end: {words}"


def _prompt(seed: int, wish: Plan):
    """Return text, messages or token ids."""
    number = _number(wish["id"])
    if wish["shape"] == "ids":
        shared = random.Random(f"{seed}/{number % 4}").choices(range(5, 1000), k=wish["shared"])
        return shared + random.Random(number).choices(range(5, 1000), k=max(1, wish["own"]))
    shared = random.Random(f"{seed}/{number % 4}").choices(WORDS, k=wish["shared"] // 8)
    text = " ".join([*shared, *random.Random(number).choices(WORDS, k=1 + wish["own"] // 8)])
    return text if wish["shape"] == "text" else [("system", "Be brief."), ("user", text)]


def _number(name: str) -> int:
    return random.Random(name).randrange(1 << 30)
