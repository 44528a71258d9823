"""A server that only writes: `python -m bench.processes.writing_server N` answers every Generate with N messages.

With [STEP_MS TOKENS] a message has TOKENS ids and their text, and every stream gets one every STEP_MS, all at the same
time. It is the baseline of bench/gateway.py, since no grpc.aio server could do with less."""

import asyncio
import itertools
import sys

import grpc
import uvloop

from baton.v1 import inference_pb2 as pb

SERVICE = pb.DESCRIPTOR.services_by_name["Inference"].full_name


class Steps:
    """Wakes all streams at the same time; with a step of 0 none waits."""

    def __init__(self, step_s: float):
        self._step_s = step_s
        self._waiting: list[asyncio.Future] = []

    async def next(self) -> None:
        if self._step_s:
            future = asyncio.get_running_loop().create_future()
            self._waiting.append(future)
            await future

    async def run(self) -> None:
        at = asyncio.get_running_loop().time()
        while self._step_s:
            at += self._step_s
            await asyncio.sleep(at - asyncio.get_running_loop().time())
            waiting, self._waiting = self._waiting, []
            for future in waiting:
                if not future.done():
                    future.set_result(None)


def handlers(num_messages: int, num_tokens: int, steps: Steps) -> grpc.GenericRpcHandler:
    """Return handlers that take and return bytes: the stub must be faster than its caller."""
    token_ids, text = [107] * num_tokens, " abc" * num_tokens
    message = pb.GenerateResponse(token_ids=token_ids, text=text).SerializeToString()
    last = pb.GenerateResponse(
        token_ids=token_ids, text=text, usage=pb.Usage(prompt_tokens=1), timing=pb.Timing(ttft_s=0.1)
    )
    messages = [message] * (num_messages - 1) + [last.SerializeToString()]

    async def generate(request: bytes, context: grpc.aio.ServicerContext) -> None:
        await context.write(messages[0])
        for each in itertools.islice(messages, 1, None):  # a slice would take memory for each stream
            await steps.next()
            await context.write(each)

    return grpc.method_handlers_generic_handler(SERVICE, {"Generate": grpc.unary_stream_rpc_method_handler(generate)})


async def serve(num_messages: int, step_ms: float = 0.0, num_tokens: int = 1) -> None:
    steps = Steps(step_ms / 1e3)
    server = grpc.aio.server()
    server.add_generic_rpc_handlers((handlers(num_messages, num_tokens, steps),))
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    print(f"ready grpc=127.0.0.1:{port}", flush=True)
    stepping = asyncio.create_task(steps.run())
    await server.wait_for_termination()
    stepping.cancel()


if __name__ == "__main__":
    uvloop.install()
    asyncio.run(serve(int(sys.argv[1]), *map(float, sys.argv[2:3]), *map(int, sys.argv[3:4])))
