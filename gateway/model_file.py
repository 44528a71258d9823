"""A model as the gateway is given it: a folder, or a .gguf file, whose metadata say the same."""

from pathlib import Path

from baton.gguf import GGUFError, GGUFHeader, is_gguf
from baton.service.settings import SettingsError
from gateway.gguf_tokenizer import tokenizer_json
from gateway.model_folder import Defaults, ModelFolder, read_folder

EMBEDDING = "token_embd.weight"
ENDS = ("eos_token_id", "eot_token_id", "eom_token_id")
# What chat templates call a token -> what the format does; one of its names is misspelt.
SPECIAL = {
    "bos_token": "bos",
    "eos_token": "eos",
    "unk_token": "unknown",
    "pad_token": "padding",
    "sep_token": "seperator",
}


def read_model(path: Path) -> ModelFolder:
    """Raises SettingsError: one line that names the file."""
    if not is_gguf(path):
        return read_folder(path)
    try:
        return _read_gguf(GGUFHeader(path))
    except GGUFError as error:
        raise SettingsError(str(error)) from None


def _read_gguf(header: GGUFHeader) -> ModelFolder:
    context = header.get(f"{header.get('general.architecture')}.context_length")
    if context is None or EMBEDDING not in header.tensors:
        raise SettingsError(f"{header.path}: context_length or {EMBEDDING} is missing: not a language model")
    ends = {header.get(f"tokenizer.ggml.{name}") for name in ENDS} - {None}
    return ModelFolder(
        path=header.path,
        name=header.path.stem,
        context=context,
        vocab_size=header.tensors[EMBEDDING].shape[0],
        eos_ids=frozenset(ends),
        defaults=Defaults(),
        tokenizer_json=tokenizer_json(header),
        tokenizer_digest=header.tokenizer_digest,
        chat_template=header.get("tokenizer.chat_template"),
        special_tokens=_special_tokens(header),
    )


def _special_tokens(header: GGUFHeader) -> dict[str, str]:
    tokens = header.get("tokenizer.ggml.tokens")
    ids = {name: header.get(f"tokenizer.ggml.{key}_token_id") for name, key in SPECIAL.items()}
    return {name: tokens[token_id] for name, token_id in ids.items() if token_id is not None and token_id < len(tokens)}
