"""Ask with chat messages and read one whole answer: python examples/chat.py [HOST:PORT].

The model's own chat template turns messages into tokens. An answer that cannot be given raises grpc.RpcError: its code says
whether to try again (UNAVAILABLE, RESOURCE_EXHAUSTED) or to mend the request (INVALID_ARGUMENT)."""

import sys

import grpc

from baton.v1 import inference_pb2 as pb
from baton.v1 import inference_pb2_grpc


def main(target: str = "127.0.0.1:50051") -> None:
    messages = pb.Messages(
        messages=[
            pb.Message(role="system", content="You write Python."),
            pb.Message(role="user", content="A function that reads a file line by line."),
        ]
    )
    request = pb.GenerateRequest(messages=messages)
    request.stopping.max_tokens = 32
    with grpc.insecure_channel(target) as channel:
        try:
            answer = inference_pb2_grpc.InferenceStub(channel).Complete(request, timeout=30)
        except grpc.RpcError as error:
            sys.exit(f"{target}: {error.code().name}: {error.details()}")
    print(answer.choices[0].text)


if __name__ == "__main__":
    main(*sys.argv[1:])
