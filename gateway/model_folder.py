"""What the gateway reads of a model folder: names, limits, defaults, the chat template. Never the weights."""

import hashlib
import json
from dataclasses import dataclass, field
from pathlib import Path

from baton.service.settings import SettingsError

_SPECIAL_NAMES = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")


@dataclass(frozen=True, slots=True)
class Defaults:
    """What a request means where it is silent: generation_config.json, and where that is silent, plain."""

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    max_tokens: int = 256


@dataclass(frozen=True, slots=True)
class ModelFolder:
    path: Path
    name: str
    context: int
    vocab_size: int
    eos_ids: frozenset[int]
    defaults: Defaults
    tokenizer_json: bytes = field(repr=False)
    tokenizer_digest: bytes  # workers and gateway must read the same tokenizer
    chat_template: str | None = field(repr=False)
    special_tokens: dict[str, str]


def read_folder(path: Path) -> ModelFolder:
    """Read a Hugging Face folder. Raises SettingsError: one line that names the file."""
    config = _read_json(path / "config.json")
    generation = _read_json(path / "generation_config.json", optional=True)
    tokenizer_config = _read_json(path / "tokenizer_config.json", optional=True)
    special_tokens = _read_json(path / "special_tokens_map.json", optional=True) | tokenizer_config
    tokenizer_json = _read_bytes(path / "tokenizer.json")
    try:
        return ModelFolder(
            path=path,
            name=path.resolve().name,
            context=int(config["max_position_embeddings"]),
            vocab_size=int(config["vocab_size"]),
            eos_ids=_eos_ids(generation.get("eos_token_id", config.get("eos_token_id"))),
            defaults=_defaults(generation),
            tokenizer_json=tokenizer_json,
            tokenizer_digest=hashlib.sha256(tokenizer_json).digest(),
            chat_template=_chat_template(path, tokenizer_config),
            special_tokens=_special_tokens(special_tokens),
        )
    except KeyError as error:
        raise SettingsError(f"{path / 'config.json'}: {error.args[0]} is missing") from None
    except (TypeError, ValueError) as error:
        raise SettingsError(f"{path}: config.json or generation_config.json: {error}") from None


def _read_bytes(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise SettingsError(f"{path}: {error.strerror}") from None


def _read_json(path: Path, optional: bool = False) -> dict:
    if optional and not path.exists():
        return {}
    try:
        value = json.loads(_read_bytes(path))
    except ValueError as error:
        raise SettingsError(f"{path}: not JSON: {error}") from None
    if not isinstance(value, dict):
        raise SettingsError(f"{path}: not a JSON object")
    return value


def _eos_ids(value: int | list[int] | None) -> frozenset[int]:
    if value is None:
        return frozenset()
    return frozenset([value] if isinstance(value, int) else map(int, value))


def _defaults(generation: dict) -> Defaults:
    """transformers ignores temperature unless do_sample is set; so do we."""

    def number(name: str, default):
        value = generation.get(name)
        return default if value is None else type(default)(value)

    plain = Defaults()
    return Defaults(
        temperature=number("temperature", 1.0) if generation.get("do_sample") else plain.temperature,
        top_k=number("top_k", plain.top_k),
        top_p=number("top_p", plain.top_p),
        min_p=number("min_p", plain.min_p),
        repetition_penalty=number("repetition_penalty", plain.repetition_penalty),
        max_tokens=number("max_new_tokens", plain.max_tokens),
    )


def _chat_template(folder: Path, tokenizer_config: dict) -> str | None:
    """chat_template.jinja goes before tokenizer_config.json; of several named ones, "default"."""
    path = folder / "chat_template.jinja"
    if path.exists():
        return _read_bytes(path).decode()
    template = tokenizer_config.get("chat_template")
    if isinstance(template, list):
        template = {entry["name"]: entry["template"] for entry in template}.get("default")
    return template


def _special_tokens(values: dict) -> dict[str, str]:
    found = {name: values[name] for name in _SPECIAL_NAMES if values.get(name)}
    return {name: value["content"] if isinstance(value, dict) else value for name, value in found.items()}
