"""Send many requests at once over one channel: python examples/many_at_once.py [HOST:PORT].

The gateway refuses what it cannot serve in time with RESOURCE_EXHAUSTED and says when to try again (RetryInfo); this
client waits and tries again."""

import asyncio
import sys

import grpc
from google.rpc import error_details_pb2, status_pb2

from baton.v1 import inference_pb2 as pb
from baton.v1 import inference_pb2_grpc

PROMPTS = [f"def function_{i}(" for i in range(16)]


async def complete(stub: inference_pb2_grpc.InferenceStub, prompt: str) -> str:
    request = pb.GenerateRequest(text=prompt)
    request.stopping.max_tokens = 16
    while True:
        try:
            return (await stub.Complete(request, timeout=60)).choices[0].text
        except grpc.aio.AioRpcError as error:
            if error.code() is not grpc.StatusCode.RESOURCE_EXHAUSTED:
                raise
            await asyncio.sleep(retry_delay_s(error))


def retry_delay_s(error: grpc.aio.AioRpcError) -> float:
    """Returns what the server asks for in google.rpc.RetryInfo, else 0.1 s."""
    for name, value in error.trailing_metadata() or ():
        if name == "grpc-status-details-bin":
            for detail in status_pb2.Status.FromString(value).details:
                info = error_details_pb2.RetryInfo()
                if detail.Unpack(info):
                    return info.retry_delay.ToTimedelta().total_seconds()
    return 0.1


async def main(target: str = "127.0.0.1:50051") -> None:
    async with grpc.aio.insecure_channel(target) as channel:
        stub = inference_pb2_grpc.InferenceStub(channel)
        for prompt, text in zip(
            PROMPTS, await asyncio.gather(*(complete(stub, each) for each in PROMPTS)), strict=True
        ):
            print(repr(prompt + text))


if __name__ == "__main__":
    asyncio.run(main(*sys.argv[1:]))
