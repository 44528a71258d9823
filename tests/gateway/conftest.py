"""A small model folder without weights, and a gateway in this process between FakeWorkers."""

import asyncio
import contextlib
import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import grpc
import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from baton.protocol import DEFAULT_TENANT
from baton.service.clock import now
from baton.service.observe.telemetry import TraceContext
from baton.v1 import inference_pb2_grpc
from gateway.api.ports import open_ports
from gateway.app import Gateway
from gateway.config.settings import GatewaySettings
from gateway.fleet.model_fleet import ModelFleet
from gateway.model.model_file import read_model
from gateway.model.model_folder import read_folder
from gateway.orchestration.pipeline import Pipeline
from gateway.queue.quotas import Quotas
from gateway.request.request_spec import SpecBuilder
from gateway.request.validation import validate
from tests.support.client import make_request
from tests.support.gateway.fake_worker import FakeWorker
from tests.support.waiting import until_async

CONTROLS = ["<|endoftext|>", "<|user|>", "<|assistant|>", "<|system|>", "<|end|>"]
TEMPLATE = (
    "{% if tools %}{{ tools | tojson }}{% endif %}"
    "{% for message in messages %}{{ '<|' + message['role'] + '|>' + message['content'] }}"
    "{% for call in message.tool_calls %}{{ call.function | tojson }}{% endfor %}{{ '<|end|>' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}"
)
TEXTS = ["The quick brown fox jumps over the lazy dog. Größe, façade, naïve, 東京, Здравствуйте, 🙂. " * 8]


@pytest.fixture(scope="session")
def folder(tmp_path_factory) -> Path:
    """A model folder as the gateway reads it; vocabulary of 400, context 1,024."""
    path = tmp_path_factory.mktemp("folder") / "fake"
    path.mkdir()
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=400,
        special_tokens=CONTROLS,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(TEXTS, trainer)
    tokenizer.save(str(path / "tokenizer.json"))
    write = lambda name, value: (path / name).write_text(json.dumps(value))  # noqa: E731
    write("config.json", {"max_position_embeddings": 1024, "vocab_size": 400, "eos_token_id": 0})
    write("generation_config.json", {"do_sample": False, "eos_token_id": [0, 4]})
    write("tokenizer_config.json", {"chat_template": TEMPLATE, "eos_token": "<|endoftext|>"})
    return path


@pytest.fixture(scope="session")
def digest(folder) -> bytes:
    return hashlib.sha256((folder / "tokenizer.json").read_bytes()).digest()


@dataclass
class Cluster:
    """A gateway between FakeWorkers, and a client's stub."""

    gateway: Gateway
    prefill: list[FakeWorker]
    decode: list[FakeWorker]
    stub: inference_pb2_grpc.InferenceStub
    channel: grpc.aio.Channel
    target: str
    stop: asyncio.Event  # as SIGTERM sets it
    workers: list[FakeWorker] = field(default_factory=list)

    @property
    def pipeline(self) -> Pipeline:
        """Of the first model."""
        return self.gateway.catalog.versions[0].pipeline

    @property
    def fleet(self) -> ModelFleet:
        """The workers of the first model."""
        return self.pipeline.fleet

    async def idle(self) -> None:
        """Every worker has everything back, and the gateway has no leg open and waits for no prompt to be read."""
        links = self.gateway.registry.links
        await self.until(
            lambda: not any(worker.held for worker in self.workers) and not any(each.legs for each in links)
        )
        assert not any(link.num_prefill_tokens for link in links)

    async def until(self, is_true) -> None:
        await until_async(is_true)

    def park(self, request_id: str, prompt, max_tokens: int, seed: int, n: int = 1) -> None:
        """Every decode worker has such a sequence, as if its session had been lost."""
        request = make_request(prompt, request_id=request_id, max_tokens=max_tokens, seed=seed, n=n)
        validated, hashes = validate(request, self.fleet.model), self.pipeline.prefix_hashes
        spec = SpecBuilder(
            validated, prompt, max_tokens, hashes, DEFAULT_TENANT, TraceContext(0, 0), now() + 60
        ).build()
        for worker in self.decode:
            worker.parked[request_id] = spec

    async def spread(self) -> None:
        """Every worker's index events have arrived."""
        feeds = self.gateway.index._feeds
        await self.until(
            lambda: all(
                len(feeds[w.instance + w.epoch.to_bytes(8, "little")].spans) == len(w.spans)
                for w in self.workers
                if w.instance + w.epoch.to_bytes(8, "little") in feeds
            )
        )


@pytest.fixture
def cluster(folder, digest):
    """`async with cluster(num_prefill=1, num_decode=1, **settings) as c`; in place of a number, the context of each."""

    @contextlib.asynccontextmanager
    async def start(num_prefill: int | Sequence[int] = 1, num_decode: int | Sequence[int] = 1, **settings):
        vocab_size = read_folder(folder).vocab_size

        async def workers(role: str, num: int | Sequence[int]) -> list[FakeWorker]:
            contexts = [1024] * num if isinstance(num, int) else num
            return [await FakeWorker(role, digest, vocab_size, context=context).start() for context in contexts]

        prefill, decode = await workers("prefill", num_prefill), await workers("decode", num_decode)
        values = {
            "model": folder,
            "listen": "127.0.0.1:0",
            "prefill_workers": tuple(worker.address for worker in prefill),
            "decode_workers": tuple(worker.address for worker in decode),
            **settings,
        }
        values.setdefault("split", "always" if prefill else "auto")
        settings = GatewaySettings(**values)
        quotas = Quotas.read(settings.quotas)
        ports = open_ports(settings, quotas)
        port = ports.port
        gateway = Gateway(settings, [read_model(path, name) for name, path in settings.models.items()], ports, quotas)
        stop = asyncio.Event()
        running = asyncio.create_task(gateway.run(port, stop))
        channel = grpc.aio.insecure_channel(f"127.0.0.1:{port}")
        stub, target = inference_pb2_grpc.InferenceStub(channel), f"127.0.0.1:{port}"
        c = Cluster(gateway, prefill, decode, stub, channel, target, stop, prefill + decode)
        try:
            await c.until(lambda: all(link.is_serving for link in gateway.registry.links))
            yield c
        finally:
            await channel.close()
            stop.set()
            assert await running == 0
            for worker in c.workers:
                await worker.stop()

    return start


@pytest.fixture
def saying(cluster, folder):
    """`async with saying(text, **settings) as c`: a model in the manner of Hermes that answers with this text."""

    @contextlib.asynccontextmanager
    async def start(text: str, **settings):
        tokens = Tokenizer.from_file(str(folder / "tokenizer.json"))
        async with cluster(**{"tool_call_parser": "hermes", **settings}) as c:
            for worker in c.workers:
                worker.script = tokens.encode(text, add_special_tokens=False).ids
            yield c

    return start


@pytest.fixture
def capable(monkeypatch):
    """Every worker says that it keeps constraints."""
    make = FakeWorker.__init__
    monkeypatch.setattr(
        FakeWorker, "__init__", lambda self, *args, **hello: make(self, *args, **{"features": ["constraints"], **hello})
    )
