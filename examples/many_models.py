"""Ask every model behind a gateway: python examples/many_models.py [HOST:PORT].

Serve the two that are shipped with: baton up --model code=demo/target,experts=demo/mixture"""

import sys

from baton.client import CallError, Client

PROMPT = "def read_lines(path):"


def main(target: str = "127.0.0.1:50051") -> None:
    with Client(target) as client:
        try:
            for model in client.list_models():
                answer = client.generate(PROMPT, model=model.name, max_tokens=32, temperature=0)
                print(f"{model.name} ({model.family}): {PROMPT}{answer.choices[0].text}", end="\n\n")
        except CallError as error:
            sys.exit(f"{target}: {error}")


if __name__ == "__main__":
    main(*sys.argv[1:])
