"""The calibration set: texts like those that the model will serve, cut into short samples."""

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
from tokenizers import Tokenizer
from torch import Tensor

from baton.quantization.core.errors import QuantizeError

DEFAULT = Path(__file__).with_name("calibration.jsonl")
NUM_SAMPLES = 64
SAMPLE_TOKENS = 512
MIN_TOKENS = 8  # of a sample: shorter ones tell nothing

Messages = list[dict[str, str]]
Render = Callable[[Messages], str]  # renders a conversation by the model's chat template


@dataclass(frozen=True)
class Prompt:
    """One line of the set: a text, or a conversation to be rendered by the model's chat template."""

    line: int
    text: str | None
    messages: Messages | None


def read_prompts(path: Path) -> list[Prompt]:
    """Read JSON lines, each an object with "text", "prompt" or "messages". Raises QuantizeError with the line
    number."""
    try:
        # not splitlines(): JSON texts may hold other line separators
        lines = path.read_text(encoding="utf-8").split("\n")
    except (OSError, UnicodeDecodeError) as error:
        raise QuantizeError(f"{path}: not readable ({error})") from None
    prompts = [_prompt(f"{path}, line {number}", number, line) for number, line in enumerate(lines, 1) if line.strip()]
    if not prompts:
        raise QuantizeError(f'{path}: empty; give JSON lines such as {{"text": "..."}}')
    return prompts


def load_tokenizer(model: Path) -> Tokenizer:
    """Return the tokenizer of a model folder, without the truncation and padding that it was saved with. Raises
    QuantizeError."""
    path = model / "tokenizer.json"
    try:
        tokenizer = Tokenizer.from_file(str(path))
    except Exception as error:  # tokenizers raises Exception itself
        raise QuantizeError(f"{path}: not a tokenizer ({error})") from None
    tokenizer.no_truncation()
    tokenizer.no_padding()
    return tokenizer


def check_vocabulary(tokenizer: Tokenizer, largest: int, vocab_size: int, model: Path) -> None:
    """Check that the largest id of a text is a token of the model. Raises QuantizeError."""
    if largest >= vocab_size:
        what = f"token {tokenizer.id_to_token(largest)!r} has id {largest}, the model has {vocab_size} tokens"
        raise QuantizeError(f"{model / 'tokenizer.json'}: {what}; give it the tokenizer that it was trained with")


def make_samples(prompts: list[Prompt], tokenizer: Tokenizer, render: Render) -> list[Tensor]:
    """Return token ids int64 [at most SAMPLE_TOKENS] of at most NUM_SAMPLES prompts, evenly spread over the list.
    Raises QuantizeError if all of them are too short."""
    count = min(NUM_SAMPLES, len(prompts))
    chosen = [prompts[index * len(prompts) // count] for index in range(count)]
    samples = [torch.tensor(_encode(prompt, tokenizer, render)[:SAMPLE_TOKENS]) for prompt in chosen]
    samples = [sample for sample in samples if len(sample) >= MIN_TOKENS]
    if not samples:
        raise QuantizeError(f"the calibration texts are all shorter than {MIN_TOKENS} tokens; give longer ones")
    return samples


def _encode(prompt: Prompt, tokenizer: Tokenizer, render: Render) -> list[int]:
    """Return the token ids of a prompt. A chat template writes all special tokens itself, the first one included."""
    if prompt.messages is None:
        return tokenizer.encode(prompt.text, add_special_tokens=True).ids
    return tokenizer.encode(render(prompt.messages), add_special_tokens=False).ids


def _prompt(where: str, number: int, line: str) -> Prompt:
    try:
        record = json.loads(line)
    except json.JSONDecodeError as error:
        raise QuantizeError(f"{where}: not JSON ({error.msg}); each line is an object") from None
    if not isinstance(record, dict):
        raise QuantizeError(f"{where}: not a JSON object")
    text = record.get("text", record.get("prompt"))
    messages = record.get("messages")
    if isinstance(text, str) and text.strip() and messages is None:
        return Prompt(number, text, None)
    if text is None and _is_conversation(messages):
        return Prompt(number, None, messages)
    raise QuantizeError(f'{where}: needs one of "text" or "prompt" (a text) or "messages" (role and content each)')


def _is_conversation(messages: object) -> bool:
    return (
        isinstance(messages, list)
        and len(messages) > 0
        and all(
            isinstance(message, dict) and all(isinstance(message.get(key), str) for key in ("role", "content"))
            for message in messages
        )
    )
