"""While the worst of each kind is worked on, the gateway's event loop keeps running: a heartbeat on it is never
starved, neither by what runs on the loop nor by a thread that keeps Python's lock."""

import asyncio
import contextlib
import gc
import hashlib
import json
import time

import grpc
import pytest

from baton.v1 import inference_pb2 as pb
from tests.gateway.calls import read
from tests.support.client import make_request
from tests.support.gateway.small_tokenizers import byte_level, sentencepiece
from tests.support.pace import patience

# CPU time of the loop's thread between two beats, client, server and two workers on it: messages of a mebibyte take 20
# ms.
MOST_CPU_S = 0.3
CONTEXT = 1 << 20
WIDE = ([CONTEXT], [CONTEXT])
UNUSED = tuple(f"<unused{i}>" for i in range(6242))
TEMPLATE = "{% for m in messages %}<|user|>\n{{ m['content'] }}<|end|>\n{% endfor %}<|assistant|>\n"


@pytest.fixture(params=["byte_level", "sentencepiece"])
def folder(request, tmp_path):
    """With Gemma's number of control tokens, and no bound on what the context lets through."""
    path = tmp_path / "fake"
    path.mkdir()
    made = byte_level(unspecial=UNUSED) if request.param == "byte_level" else sentencepiece("normalizer", added=UNUSED)
    content = json.loads(made)
    known = {token["content"] for token in content["added_tokens"]}
    flags = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": False}
    added = [{"id": content["model"]["vocab"].get(text), "content": text, **flags} for text in UNUSED]
    content["added_tokens"] += [token for token in added if token["content"] not in known]
    (path / "tokenizer.json").write_text(json.dumps(content))
    write = lambda name, value: (path / name).write_text(json.dumps(value))  # noqa: E731
    write("config.json", {"max_position_embeddings": CONTEXT, "vocab_size": 7000, "eos_token_id": 2})
    write("tokenizer_config.json", {"chat_template": TEMPLATE})
    return path


@pytest.fixture
def digest(folder) -> bytes:
    return hashlib.sha256((folder / "tokenizer.json").read_bytes()).digest()


class Heartbeat:
    def __init__(self):
        self.most_cpu_s = self.most_s = self.began = 0.0
        self.num = 0

    async def beat(self) -> None:
        self.began = at = time.monotonic()
        cpu = time.thread_time()
        while True:
            await asyncio.sleep(0.001)
            self.num += 1
            self.most_cpu_s = max(self.most_cpu_s, time.thread_time() - cpu)
            self.most_s = max(self.most_s, time.monotonic() - at)
            at, cpu = time.monotonic(), time.thread_time()


@contextlib.asynccontextmanager
async def guarded():
    """The loop's thread is never busy for long at a time; nor is it kept waiting for half of a long piece of work. What
    thousands of tests before left on the heap is not collected meanwhile: that took 0.6 s."""
    gc.freeze()
    heart = Heartbeat()
    beating = asyncio.create_task(heart.beat())
    try:
        await asyncio.sleep(0.02)
        yield heart
    finally:
        beating.cancel()
        gc.unfreeze()
    whole_s = time.monotonic() - heart.began
    print(
        f"{heart.num} beats, {heart.most_cpu_s:.3f} s of CPU and {heart.most_s:.3f} of {whole_s:.3f} s at most between two"
    )
    assert heart.most_cpu_s < patience(MOST_CPU_S)
    assert whole_s < patience(2.0) or heart.most_s < whole_s / 2


def tokenize(c, text: str = "", contents=()):
    messages = pb.Messages(messages=[pb.Message(role="user", content=content) for content in contents])
    request = pb.TokenizeRequest(messages=messages) if contents else pb.TokenizeRequest(text=text)
    return c.stub.Tokenize(request, timeout=120)


MIB = (1 << 20) - 64
WORST_TEXTS = {
    "control tokens": "<|user|>" * (MIB // 8),
    "half of one": "<unused" * (MIB // 7),
    "one letter": "a" * MIB,
    "spaces": " " * MIB,
    "words": "the fox " * (MIB // 8),
    "one that becomes eighteen": "\ufdfa" * (MIB // 3),
    "accents on one letter": "e" + "\u0301" * (MIB // 2 - 1),
    "right to left": "\u202e\u05d0" * (MIB // 5),
    "zeros": "\0" * MIB,
    "emoji": "🙂" * (MIB // 4),
}


PLAIN = ("words", "zeros", "one letter", "accents on one letter")  # beside which others are worse


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=pytest.mark.long) if name in PLAIN else name for name in WORST_TEXTS]
)
async def test_long_texts_do_not_block_the_loop(cluster, name):
    async with cluster(*WIDE) as c:
        await tokenize(c, "warm")
        async with guarded():
            assert (await tokenize(c, WORST_TEXTS[name])).token_ids


@pytest.mark.parametrize("name", ["control tokens", "half of one", "one letter", "emoji"])
async def test_many_short_texts_do_not_block_the_loop(cluster, name):
    """Fifty in one turn of the loop, without a thread: some 2 ms each on a busy machine."""
    async with cluster(*WIDE) as c:
        await tokenize(c, "warm")
        async with guarded():
            await asyncio.gather(*(tokenize(c, WORST_TEXTS[name][:2000]) for _ in range(50)))


@pytest.mark.parametrize("content", ["<|user|>", "<unused5", "x" * 900])
async def test_long_conversations_do_not_block_the_loop(cluster, content):
    async with cluster(*WIDE) as c:
        await tokenize(c, contents=["warm"])
        async with guarded():
            assert (await tokenize(c, contents=[content] * 1024)).token_ids


async def test_detokenizing_does_not_block_the_loop(cluster, folder):
    vocabulary = json.loads((folder / "tokenizer.json").read_text())["model"]["vocab"]
    special = json.loads((folder / "tokenizer.json").read_text())["added_tokens"][0]["id"]
    for token_ids in ([special] * 500_000, [vocabulary.get("<0x80>", 100)] * 500_000, list(range(6500)) * 40):
        async with cluster(*WIDE) as c:
            async with guarded():
                await c.stub.Detokenize(pb.DetokenizeRequest(token_ids=token_ids), timeout=60)


class OneLetter:
    """A decoder: whatever the token, it is four letters."""

    def push(self, token_ids) -> str:
        return "aaaa" * len(token_ids)

    def finish(self) -> str:
        return ""


async def test_stop_strings_do_not_block_the_loop(cluster, monkeypatch):
    """One of which all but matches everywhere, in eight choices."""
    stops = ["a" * 254 + "b", *(chr(ord("c") + i) * 255 for i in range(15))]
    async with cluster(*WIDE) as c:
        monkeypatch.setattr(c.pipeline.text.detokenizer, "decoder", lambda continues: OneLetter())
        async with guarded():
            for _ in range(3):
                call = c.stub.Generate(make_request(list(range(20, 320)), n=8, max_tokens=200, stop=stops), timeout=60)
                assert await read(call)


@pytest.mark.parametrize("source", ["{{ 'a' * 3000000000 }}", "{% for i in range(9999) %}" * 8 + "{% endfor %}" * 8])
async def test_endless_templates_do_not_block_the_loop(cluster, folder, source):
    (folder / "tokenizer_config.json").write_text(json.dumps({"chat_template": source}))
    async with cluster(*WIDE) as c:
        async with guarded():
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await tokenize(c, contents=["hello"])
        assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
