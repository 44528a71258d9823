"""Send what one tenant can to harm the others, as fast as it is served or refused: for bench/overload.py."""

import asyncio
import contextlib
import multiprocessing
import os
import random
from collections.abc import Iterator

import grpc

from baton.service.security.access import Access
from baton.v1 import inference_pb2 as pb
from baton.v1 import inference_pb2_grpc

KINDS = ("streams", "prompts", "tokenize", "unread")
_NUM_CALLS = {"streams": 250, "prompts": 250, "tokenize": 32, "unread": 250}
_PAUSE_S = 0.02  # after a refusal
_MESSAGE_CHARACTERS, _MESSAGE_IDS = 8_000, 2_000


@contextlib.contextmanager
def flooding(kind: str, target: str, access: Access, vocab_size: int, context: int) -> Iterator[None]:
    """From a process of its own, which gives way to others: it is no part of what is measured."""
    process = multiprocessing.get_context("spawn").Process(
        target=_run, args=(kind, target, access, vocab_size, context), daemon=True
    )
    process.start()
    try:
        yield
    finally:
        process.terminate()
        process.join()


def _run(kind: str, target: str, access: Access, vocab_size: int, context: int) -> None:
    os.nice(10)
    asyncio.run(_flood(kind, target, access, vocab_size, context))


async def _flood(kind: str, target: str, access: Access, vocab_size: int, context: int) -> None:
    async with access.channel(target, (("grpc.max_receive_message_length", -1),)) as channel:
        stub, rng = inference_pb2_grpc.InferenceStub(channel), random.Random(kind)

        async def go_on() -> None:
            while True:
                try:
                    await _one(kind, stub, rng, access, vocab_size, context)
                except grpc.aio.AioRpcError:
                    await asyncio.sleep(_PAUSE_S)

        await asyncio.gather(*(go_on() for _ in range(_NUM_CALLS[kind])))


async def _one(kind: str, stub, rng: random.Random, access: Access, vocab_size: int, context: int) -> None:
    def ids(num: int) -> list[int]:
        return [rng.randrange(vocab_size) for _ in range(num)]

    if kind == "tokenize":
        text = "".join(rng.choice("abcdefgh \n") for _ in range(_MESSAGE_CHARACTERS))
        await stub.Tokenize(pb.TokenizeRequest(text=text), timeout=10, metadata=access.metadata)
        await stub.Detokenize(pb.DetokenizeRequest(token_ids=ids(_MESSAGE_IDS)), timeout=10, metadata=access.metadata)
        return
    num_prompt = context - 100 if kind == "prompts" else 64
    num_output = {"streams": 400, "prompts": 1, "unread": context - num_prompt - 8}[kind]
    request = pb.GenerateRequest(
        token_ids=pb.TokenIds(ids=ids(num_prompt)),
        sampling=pb.Sampling(temperature=1.0),
        stopping=pb.Stopping(max_tokens=num_output, ignore_eos=True),
        priority=10,
    )
    if kind != "prompts":
        request.sampling.n, request.sampling.logprobs = 8, 20
    call = stub.Generate(request, timeout=60, metadata=access.metadata)
    if kind == "unread":
        await call.code()  # its answer stays where it is
        return
    async for _ in call:
        pass
