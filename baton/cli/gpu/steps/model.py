"""Step 7: compare the log-probabilities of the next token, with the model's own weights, with those of transformers."""

import gc
import importlib.util
from pathlib import Path
from typing import Any

import torch

from baton.cli.gpu.check import Say
from baton.engine.core.config import EngineConfig
from baton.engine.core.request import Key, PrefillDone, Request
from baton.engine.engine import Engine
from baton.sampling_params import SamplingParams

NUM_PROMPTS, PROMPT_TOKENS, BEST = 20, 48, 5
LEAST_AGREEING = 0.9  # of the prompts: rounding may swap two equally likely tokens
TEXT = (
    "A prefill worker reads the prompt and hands its keys and values on, block by block; a decode worker takes them, "
    "checks every byte, and writes the answer token by token until the last one. Between the two lies the network, "
)
TOLERANCE = 0.25  # of a log-probability, in bf16


def check(say: Say, model: Path | None, device: str = "cuda") -> None:
    if model is None:
        say("logits", None, "give --model DIR")
        return
    if importlib.util.find_spec("transformers") is None:
        say("logits", None, "transformers, beside which they are held, is not installed: pip install transformers")
        return
    prompts = _prompts(model)
    ours = _all_ours(model, prompts, device)
    theirs = _theirs(model, prompts, device)
    agreeing = sum(_best(mine) == _best(wanted) for mine, wanted in zip(ours, theirs, strict=True))
    largest = max(abs(mine[id_] - wanted[id_]) for mine, wanted in zip(ours, theirs, strict=True) for id_ in mine)
    is_right = agreeing >= LEAST_AGREEING * len(prompts) and largest < TOLERANCE
    say(
        "logits",
        is_right,
        f"{agreeing} of {len(prompts)} prompts agree in the best token, log-probabilities of the "
        f"{BEST} best differ by {largest:.3f} at most",
    )


def _best(logprobs: dict[int, float]) -> int:
    return max(logprobs, key=lambda id_: logprobs[id_])


def _engine(model: Path, device: str) -> Engine:
    return Engine.load(EngineConfig(model, device=device, num_blocks=64, max_num_seqs=2, max_num_batched_tokens=512))


def _prompts(model: Path) -> list[list[int]]:
    """Return prompts as token ids, cut from one text at different offsets."""
    from transformers import AutoTokenizer

    ids = AutoTokenizer.from_pretrained(model).encode(TEXT * 4)
    return [ids[start : start + PROMPT_TOKENS] for start in range(0, 2 * NUM_PROMPTS, 2)]


def _all_ours(model: Path, prompts: list[list[int]], device: str) -> list[dict[int, float]]:
    """Return the engine's log-probabilities for each prompt. The engine is freed afterwards, since transformers' model
    needs the memory next."""
    engine = _engine(model, device)
    found = [_ours(engine, ids) for ids in prompts]
    del engine
    gc.collect()
    if device == "cuda":
        torch.cuda.empty_cache()
    return found


def _ours(engine: Engine, ids: list[int]) -> dict[int, float]:
    """Return the log-probabilities of the best next tokens."""
    engine.submit(
        Request(Key(f"{hash(tuple(ids))}"), tuple(ids), len(ids), SamplingParams(logprobs=BEST), max_tokens=1)
    )
    while True:
        for output in engine.step():
            if isinstance(output, PrefillDone):
                logprobs = output.first_tokens[0].logprobs
                assert logprobs is not None
                return dict(logprobs.top)


def _theirs(model: Path, prompts: list[list[int]], device: str) -> list[dict[int, float]]:
    reference, found = _reference(model, device), []
    with torch.inference_mode():
        for ids in prompts:
            logprobs = reference(torch.tensor([ids], device=device)).logits[0, -1].float().log_softmax(0)
            found.append(dict(enumerate(logprobs.tolist())))
    return found


def _reference(model: Path, device: str) -> Any:
    from transformers import AutoModelForCausalLM

    made: torch.nn.Module = AutoModelForCausalLM.from_pretrained(model, dtype="auto")
    return torch.nn.Module.to(made, device).eval()
