"""Use the engine without gRPC: python examples/engine_alone.py [MODEL_FOLDER].

One object, one thread: submit requests, call step() until each has ended. All requests that wait share each step
(continuous batching); what a request gets does not depend on the others."""

import sys
from pathlib import Path

from tokenizers import Tokenizer

from baton.engine.core.config import EngineConfig
from baton.engine.core.request import Key, PrefillDone, Request, RequestEnded, TokenRun
from baton.engine.engine import Engine
from baton.sampling_params import SamplingParams

PROMPTS = ("def read_lines(path):", "class Stack:")


def main(model: str = str(Path(__file__).parents[1] / "demo" / "target")) -> None:
    tokenizer = Tokenizer.from_file(f"{model}/tokenizer.json")
    engine = Engine.load(EngineConfig(model=Path(model)))
    answers: dict[str, list[int]] = {}
    for prompt in PROMPTS:
        ids = tuple(tokenizer.encode(prompt, add_special_tokens=False).ids)
        engine.submit(Request(Key(prompt), ids, len(ids), SamplingParams(temperature=0), max_tokens=24))
        answers[prompt] = []
    num_open = len(PROMPTS)
    while num_open:
        for output in engine.step():
            match output:
                case PrefillDone():
                    answers[output.key.request_id] += [token.token_id for token in output.first_tokens]
                case TokenRun():
                    answers[output.key.request_id] += output.token_ids
                case RequestEnded():
                    num_open -= 1
    for prompt, ids in answers.items():
        print(prompt + tokenizer.decode(ids), end="\n\n")


if __name__ == "__main__":
    main(*sys.argv[1:])
