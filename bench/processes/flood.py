"""Send what one tenant can to harm the others, as fast as it is served or refused, for bench/overload.py."""

import asyncio
import contextlib
import multiprocessing
import os
import random
import time
from collections.abc import Iterator
from multiprocessing.context import SpawnProcess
from multiprocessing.sharedctypes import Synchronized
from typing import NamedTuple

import grpc

from baton.service.security.access import Access
from baton.v1 import inference_pb2 as pb
from baton.v1 import inference_pb2_grpc

KINDS = ("streams", "prompts", "tokenize", "unread")
_NUM_CALLS = {"streams": 250, "prompts": 250, "tokenize": 32, "unread": 250}
REACHED_S = 60.0  # until a first call is served or refused
_PAUSE_S = 0.02  # after a refusal
_MESSAGE_CHARACTERS, _MESSAGE_IDS = 8_000, 2_000


class Flood(NamedTuple):
    """Calls of one of KINDS, and how many were served or refused so far: calls that only fail are no flood."""

    kind: str
    target: str
    access: Access
    vocab_size: int
    context: int
    reached: "Synchronized[int]"

    def note_reached(self) -> None:
        with self.reached.get_lock():
            self.reached.value += 1


@contextlib.contextmanager
def flooding(kind: str, target: str, access: Access, vocab_size: int, context: int) -> Iterator[None]:
    """Flood from a separate process with low priority, which is not part of what is measured. The block begins once a
    call was served or refused. Raises RuntimeError if none is, or if the process ends, since nothing would be measured
    then."""
    spawning = multiprocessing.get_context("spawn")
    flood = Flood(kind, target, access, vocab_size, context, spawning.Value("i", 0))
    process = spawning.Process(target=_run, args=(flood,), daemon=True)
    process.start()
    try:
        deadline = time.monotonic() + REACHED_S
        while not flood.reached.value:
            _check(kind, process)
            if time.monotonic() > deadline:
                raise RuntimeError(f"the flood of {kind} was neither served nor refused within {REACHED_S:g} s")
            time.sleep(0.05)
        yield
        _check(kind, process)
    finally:
        process.terminate()
        process.join()


def _check(kind: str, process: SpawnProcess) -> None:
    """Raise RuntimeError if the process has ended."""
    if process.exitcode is not None:
        raise RuntimeError(f"the process of the flood of {kind} ended with status {process.exitcode}")


def _run(flood: Flood) -> None:
    os.nice(10)
    asyncio.run(_flood(flood))


async def _flood(flood: Flood) -> None:
    async with flood.access.channel(flood.target, (("grpc.max_receive_message_length", -1),)) as channel:
        stub, rng = inference_pb2_grpc.InferenceStub(channel), random.Random(flood.kind)

        async def go_on() -> None:
            while True:
                try:
                    await _one(flood, stub, rng)
                except grpc.aio.AioRpcError as error:
                    if error.code() is grpc.StatusCode.RESOURCE_EXHAUSTED:
                        flood.note_reached()
                    await asyncio.sleep(_PAUSE_S)

        await asyncio.gather(*(go_on() for _ in range(_NUM_CALLS[flood.kind])))


async def _one(flood: Flood, stub, rng: random.Random) -> None:
    kind, context, metadata = flood.kind, flood.context, flood.access.metadata

    def ids(num: int) -> list[int]:
        return [rng.randrange(flood.vocab_size) for _ in range(num)]

    if kind == "tokenize":
        text = "".join(rng.choice("abcdefgh \n") for _ in range(_MESSAGE_CHARACTERS))
        await stub.Tokenize(pb.TokenizeRequest(text=text), timeout=10, metadata=metadata)
        flood.note_reached()
        await stub.Detokenize(pb.DetokenizeRequest(token_ids=ids(_MESSAGE_IDS)), timeout=10, metadata=metadata)
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
    call = stub.Generate(request, timeout=60, metadata=metadata)
    if kind == "unread":
        await call.initial_metadata()  # arrives with the first message; the answer is not read
        if not call.done() or await call.code() in (grpc.StatusCode.OK, grpc.StatusCode.RESOURCE_EXHAUSTED):
            flood.note_reached()
        await call.code()
        return
    is_first = True
    async for _ in call:
        if is_first:
            flood.note_reached()
            is_first = False
