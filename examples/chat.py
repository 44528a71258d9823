"""Ask with chat messages and read one whole answer: python examples/chat.py [HOST:PORT].

The model's own chat template turns messages into tokens. What fails for now (nobody there, no room) is sent again; any
other failure raises CallError, which names the field that is wrong."""

import sys

from baton.client import CallError, Client

MESSAGES = [
    {"role": "system", "content": "You write Python."},
    {"role": "user", "content": "A function that reads a file line by line."},
]


def main(target: str = "127.0.0.1:50051") -> None:
    with Client(target, timeout_s=30) as client:
        try:
            answer = client.chat(MESSAGES, max_tokens=32)
        except CallError as error:
            sys.exit(f"{target}: {error}")
    print(answer.choices[0].text)


if __name__ == "__main__":
    main(*sys.argv[1:])
