"""Stream a completion: python examples/stream.py [HOST:PORT] (start the stack with `baton up` first).

With several gateways, give all of them with commas between: when one dies in mid-answer, the answer goes on at
another."""

import sys

from baton.client import CallError, Client


def main(target: str = "127.0.0.1:50051") -> None:
    with Client(target, timeout_s=30) as client:
        try:
            for message in client.stream("def read_lines(path):", max_tokens=48, temperature=0):
                print(message.text, end="", flush=True)
        except CallError as error:
            sys.exit(f"{target}: {error}")
    # The last message has the usage, and the phases that the time went to.
    print(f"\n{message.usage.output_tokens} tokens, the first after {message.timing.ttft_s * 1000:.1f} ms")


if __name__ == "__main__":
    main(*sys.argv[1:])
