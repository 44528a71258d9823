"""What bench/loadgen.py sends to: `python bench/loadgen_stub.py N` answers every Generate with N messages."""

import asyncio
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import grpc  # noqa: E402
import uvloop  # noqa: E402

from baton.v1 import inference_pb2 as pb  # noqa: E402

SERVICE = pb.DESCRIPTOR.services_by_name["Inference"].full_name


def handlers(num_messages: int) -> grpc.GenericRpcHandler:
    """Bytes in, bytes out: the stub is to be faster than who calls it."""
    message = pb.GenerateResponse(token_ids=[7]).SerializeToString()
    last = pb.GenerateResponse(token_ids=[7], usage=pb.Usage(prompt_tokens=1), timing=pb.Timing(ttft_s=0.1))
    messages = [message] * (num_messages - 1) + [last.SerializeToString()]

    async def generate(request: bytes, context: grpc.aio.ServicerContext) -> None:
        for each in messages:
            await context.write(each)

    return grpc.method_handlers_generic_handler(SERVICE, {"Generate": grpc.unary_stream_rpc_method_handler(generate)})


async def serve(num_messages: int) -> None:
    server = grpc.aio.server()
    server.add_generic_rpc_handlers((handlers(num_messages),))
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    print(f"ready grpc=127.0.0.1:{port}", flush=True)
    await server.wait_for_termination()


if __name__ == "__main__":
    uvloop.install()
    asyncio.run(serve(int(sys.argv[1])))
