"""Ask a model, and each of its adapters, to go on: python examples/adapters.py [HOST:PORT].

Serve the shipped model with the shipped adapter, which indents by tabs: baton up --adapter tabs=demo/adapter"""

import sys

from baton.client import CallError, Client

PROMPT = "def read_lines(path):"


def main(target: str = "127.0.0.1:50051") -> None:
    with Client(target) as client:
        try:
            (model,) = client.list_models()
            for name in (model.name, *(f"{model.name}:{adapter}" for adapter in model.adapters)):
                answer = client.generate(PROMPT, model=name, max_tokens=32, temperature=0)
                print(f"{name}: {PROMPT + answer.choices[0].text!r}", end="\n\n")
        except CallError as error:
            sys.exit(f"{target}: {error}")


if __name__ == "__main__":
    main(*sys.argv[1:])
