"""A gateway that answers at once, or as the test says."""

import asyncio
import contextlib
from collections.abc import AsyncIterator

import grpc

from baton.v1 import inference_pb2 as pb
from baton.v1 import inference_pb2_grpc
from tests.support.in_thread import serving_in_thread

BOUND_OF = {"prefill": "prefill compute", "prefill_queue": "prefill queue", "kv_wait": "transfer"}


class FakeGateway(inference_pb2_grpc.InferenceServicer):
    """`delay_s` before the first token, `step_s` before each other; every `refuse_every`-th request is refused. The
    delay is reported as that of `phase`; kv_wait comes behind the first token."""

    def __init__(self, delay_s: float = 0.0, step_s: float = 0.0, refuse_every: int = 0, phase: str = "prefill"):
        self.delay_s, self.step_s, self.refuse_every, self.phase = delay_s, step_s, refuse_every, phase
        self.prompts: list[tuple[int, ...]] = []
        self.models: list[str] = []  # that requests named

    async def GetModelInfo(self, request, context):
        return pb.GetModelInfoResponse(
            name=request.model or "stub", context=4096, vocab_size=1000, dtype="bf16", kv_dtype="bf16"
        )

    async def Generate(self, request, context):
        self.prompts.append(tuple(request.token_ids.ids))
        self.models.append(request.model)
        if self.refuse_every and len(self.prompts) % self.refuse_every == 0:
            await context.abort(grpc.StatusCode.RESOURCE_EXHAUSTED, "full")
        num, delayed = request.stopping.max_tokens, 1 if self.phase == "kv_wait" else 0
        for index in range(num):
            await asyncio.sleep((self.delay_s if index == delayed else 0) + (self.step_s if index else 0))
            message = pb.GenerateResponse(token_ids=[7])
            if index == num - 1:
                message.usage.CopyFrom(pb.Usage(prompt_tokens=len(request.token_ids.ids), cached_tokens=8))
                decode_s = num * self.step_s
                message.timing.CopyFrom(pb.Timing(**{f"{self.phase}_s": self.delay_s}))
                message.timing.bound_s.update({BOUND_OF[self.phase]: self.delay_s, "decode bandwidth": decode_s})
            await context.write(message)


def serving_gateway(stub: FakeGateway) -> contextlib.AbstractContextManager[str]:
    """Serve it in a thread of its own; yields its address."""

    @contextlib.asynccontextmanager
    async def serve() -> AsyncIterator[str]:
        server = grpc.aio.server()
        inference_pb2_grpc.add_InferenceServicer_to_server(stub, server)
        port = server.add_insecure_port("127.0.0.1:0")
        await server.start()
        try:
            yield f"127.0.0.1:{port}"
        finally:
            await server.stop(0)

    return serving_in_thread(serve)
