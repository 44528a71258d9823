"""Read the tokenizer.json of a model folder or of a .gguf file."""

from pathlib import Path

from baton.gguf import GGUFHeader, is_gguf
from baton.tokenizer.gguf_tokenizer import tokenizer_json


def read_tokenizer_json(model: Path) -> bytes:
    """Return the vocabulary of a model as a tokenizer.json. Raises OSError, GGUFError."""
    return tokenizer_json(GGUFHeader(model)) if is_gguf(model) else (model / "tokenizer.json").read_bytes()
