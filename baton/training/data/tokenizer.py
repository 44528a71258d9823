"""The demo's tokenizer: byte-level BPE trained on the corpus, in transformers' file format."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path

from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers

from baton.quantization import calibration
from baton.quantization.core.errors import QuantizeError
from baton.training.data.files import save_atomically, save_text

END_OF_TEXT = "<|endoftext|>"
USER, ASSISTANT, SYSTEM, END = "<|user|>", "<|assistant|>", "<|system|>", "<|end|>"
SPECIAL_TOKENS = (END_OF_TEXT, USER, ASSISTANT, SYSTEM, END)

CHAT_TEMPLATE = (
    "{% for message in messages %}{{ '<|' + message['role'] + '|>' + message['content'] + '<|end|>' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}"
)

# A line break keeps the indentation after it, so "blank line, eight spaces" is one token; a word takes one leading
# space or sign (".join", "(self"); digits are split into threes.
_SPLIT = r"(?:\r?\n[ \t]*)+|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+|[ \t]+(?=\S)|\s+"


def train_tokenizer(texts: Iterable[str], vocab_size: int) -> Tokenizer:
    """Train a byte-level BPE with `vocab_size` entries, the special tokens first (ids 0 to 4)."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(_SPLIT), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=list(SPECIAL_TOKENS),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    return tokenizer


def save_tokenizer(tokenizer: Tokenizer, folder: Path, max_length: int) -> None:
    """Write tokenizer.json and tokenizer_config.json, each atomically."""
    save_atomically(folder / "tokenizer.json", lambda path: tokenizer.save(str(path)))
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": END_OF_TEXT,
        "eos_token": END_OF_TEXT,
        "pad_token": END_OF_TEXT,
        "additional_special_tokens": [USER, ASSISTANT, SYSTEM, END],
        "model_max_length": max_length,
        "clean_up_tokenization_spaces": False,
        "chat_template": CHAT_TEMPLATE,
    }
    save_text(folder / "tokenizer_config.json", json.dumps(config, indent=2) + "\n")


def check_vocabulary(tokenizer: Tokenizer, largest: int, vocab_size: int, folder: Path) -> None:
    """Check that the largest id of a text is a token of the model. Raises ValueError."""
    try:
        calibration.check_vocabulary(tokenizer, largest, vocab_size, folder)
    except QuantizeError as error:
        raise ValueError(str(error)) from None


def load_tokenizer(folder: Path) -> Tokenizer:
    """Return the tokenizer of a folder, without truncation and padding. Raises ValueError."""
    try:
        return calibration.load_tokenizer(folder)
    except QuantizeError as error:
        raise ValueError(str(error)) from None
