"""Read a model that the gateway is given: a folder, or a .gguf file whose metadata say the same."""

from dataclasses import replace
from pathlib import Path

from baton.gguf import INTEGER, TEXT, TEXTS, GGUFError, GGUFHeader, is_gguf
from baton.service.settings import SettingsError
from baton.tokenizer.gguf_tokenizer import tokenizer_json
from gateway.model.model_folder import Defaults, ModelFolder, read_folder

EMBEDDING = "token_embd.weight"
# Name of a token in chat templates -> in the format, which misspells one of its names.
SPECIAL = {
    "bos_token": "bos",
    "eos_token": "eos",
    "unk_token": "unknown",
    "pad_token": "padding",
    "sep_token": "seperator",
}


def read_model(path: Path, name: str | None = None) -> ModelFolder:
    """Return what the gateway needs of a model. `name` replaces that of its folder or file. Raises SettingsError, one
    line that names the file."""
    try:
        model = _read_gguf(GGUFHeader(path)) if is_gguf(path) else read_folder(path)
    except GGUFError as error:
        raise SettingsError(str(error)) from None
    return model if name is None else replace(model, name=name)


def _read_gguf(header: GGUFHeader) -> ModelFolder:
    context_key = f"{header.get('general.architecture', TEXT)}.context_length"
    context, embedding = header.get(context_key, INTEGER), header.tensors.get(EMBEDDING)
    if context is None or embedding is None:
        raise SettingsError(f"{header.path}: context_length or {EMBEDDING} is missing: not a language model")
    if context < 1 or len(embedding.shape) != 2:
        raise SettingsError(
            f"{header.path}: {context_key} is {context}, or {EMBEDDING} no matrix: not a language model"
        )
    return ModelFolder(
        path=header.path,
        name=header.path.stem,
        context=context,
        vocab_size=embedding.shape[0],
        eos_ids=header.end_ids(embedding.shape[0]),
        defaults=Defaults(),
        tokenizer_json=tokenizer_json(header),
        tokenizer_digest=header.tokenizer_digest,
        chat_template=header.get("tokenizer.chat_template", TEXT),
        special_tokens=_special_tokens(header),
    )


def _special_tokens(header: GGUFHeader) -> dict[str, str]:
    tokens = header.get("tokenizer.ggml.tokens", TEXTS)
    ids = {name: header.get(f"tokenizer.ggml.{key}_token_id", INTEGER, -1) for name, key in SPECIAL.items()}
    return {name: tokens[token_id] for name, token_id in ids.items() if 0 <= token_id < len(tokens)}
