"""Stream a completion: python examples/stream.py [HOST:PORT] (start the stack with `baton up` first)."""

import sys

import grpc

from baton.v1 import inference_pb2 as pb
from baton.v1 import inference_pb2_grpc


def main(target: str = "127.0.0.1:50051") -> None:
    with grpc.insecure_channel(target) as channel:
        request = pb.GenerateRequest(text="def read_lines(path):")
        request.stopping.max_tokens = 48
        request.sampling.temperature = 0
        for message in inference_pb2_grpc.InferenceStub(channel).Generate(request, timeout=30):
            print(message.text, end="", flush=True)
        # The last message has the usage, and the phases that the time went to.
        print(f"\n{message.usage.output_tokens} tokens, the first after {message.timing.ttft_s * 1000:.1f} ms")


if __name__ == "__main__":
    main(*sys.argv[1:])
