"""Read a model folder: names, limits, defaults and the chat template, never the weights."""

import contextlib
import hashlib
import json
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from baton.model_files import why_not_itself
from baton.protocol import UNLIMITED_CONTEXT
from baton.sampling_params import SAMPLING_DEFAULTS, SAMPLING_PARAMS, settle_temperature
from baton.service.settings import SettingsError

_SPECIAL_NAMES = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")
_MOST = 2**31 - 1  # for every count
# Values that published configs leave out, by the model_type of their text_config; transformers' classes have them.
_LEFT_OUT = {"gemma3_text": {"vocab_size": 262_208, "max_position_embeddings": 131_072}}


@dataclass(frozen=True, slots=True)
class Defaults:
    """Defaults of a request, from generation_config.json; values without effect where that names none."""

    sampling: Mapping[str, float] = field(default_factory=lambda: SAMPLING_DEFAULTS)  # by field of Sampling
    max_tokens: int | None = None  # None: to the end of the context


@dataclass(frozen=True, slots=True)
class ModelFolder:
    """A model as far as the gateway needs it."""

    path: Path
    name: str
    context: int
    vocab_size: int
    eos_ids: frozenset[int]
    defaults: Defaults
    tokenizer_json: bytes = field(repr=False)
    tokenizer_digest: bytes  # workers and gateway must have the same tokenizer
    chat_template: str | None = field(repr=False)
    special_tokens: dict[str, str]
    # Tokens to put around a text even if tokenizer.json does not.
    begin: str | None = None
    end: str | None = None
    tool_template: str | None = field(default=None, repr=False)  # for conversations with tools, if it is another one


def read_folder(path: Path) -> ModelFolder:
    """Read a Hugging Face folder. Raises SettingsError: one line that names the file."""
    config, generation = path / "config.json", path / "generation_config.json"
    values, preferred = _read_json(config), _read_json(generation, optional=True)
    if isinstance(text := values.get("text_config"), dict):  # a model with other inputs around a text model
        ends = {key: value for key, value in values.items() if key == "eos_token_id" and value is not None}
        values = _LEFT_OUT.get(str(text.get("model_type")), {}) | values | text | ends  # generate() ends by the outer
    tokenizer_config = path / "tokenizer_config.json"
    of_tokenizer = _read_json(tokenizer_config, optional=True)
    special_map = _read_json(path / "special_tokens_map.json", optional=True)
    tokenizer_json = _read_bytes(path / "tokenizer.json")
    with _named(config):
        vocab_size = _count(values, "vocab_size")
        has_positions = "max_position_embeddings" in values or "state_size" not in values
        context = _count(values, "max_position_embeddings") if has_positions else UNLIMITED_CONTEXT
    with _named(generation):
        defaults = _defaults(preferred)
    names_ends = preferred.get("eos_token_id") is not None
    with _named(generation if names_ends else config):
        eos_ids = _eos_ids(preferred if names_ends else values, vocab_size)
    with _named(tokenizer_config):
        special = _special_tokens(of_tokenizer, special_map)
    templates = _chat_templates(path, of_tokenizer)
    return ModelFolder(
        path=path,
        name=path.resolve().name,
        context=context,
        vocab_size=vocab_size,
        eos_ids=eos_ids,
        defaults=defaults,
        tokenizer_json=tokenizer_json,
        tokenizer_digest=hashlib.sha256(tokenizer_json).digest(),
        chat_template=templates.get("default"),
        tool_template=templates.get("tool_use"),
        special_tokens=special,
        begin=special.get("bos_token") if of_tokenizer.get("add_bos_token") is True else None,
        end=special.get("eos_token") if of_tokenizer.get("add_eos_token") is True else None,
    )


@contextlib.contextmanager
def _named(path: Path) -> Iterator[None]:
    """Turn a ValueError into a SettingsError that names the file."""
    try:
        yield
    except ValueError as error:
        raise SettingsError(f"{path}: {error}") from None


def _read_bytes(path: Path) -> bytes:
    try:
        found = path.read_bytes()
    except OSError as error:
        raise SettingsError(f"{path}: {why_not_itself(path) or error.strerror}") from None
    if reason := why_not_itself(path):
        raise SettingsError(f"{path}: {reason}")
    return found


def _read_text(path: Path) -> str:
    with _named(path):
        return _read_bytes(path).decode()


def _read_json(path: Path, optional: bool = False) -> dict:
    if optional and not os.path.lexists(path):
        return {}
    try:
        value = json.loads(_read_bytes(path))
    except (ValueError, RecursionError) as error:
        raise SettingsError(f"{path}: not JSON: {error}") from None
    if not isinstance(value, dict):
        raise SettingsError(f"{path}: not a JSON object")
    return value


def _count(config: dict, name: str) -> int:
    value = config.get(name)
    if value is None:
        raise ValueError(f"{name} is missing")
    if not _is_int(value) or not 0 < value <= _MOST:
        raise ValueError(f"{name} is {_shown(value)}, not an integer from 1 to {_MOST}")
    return value


def _eos_ids(config: dict, vocab_size: int) -> frozenset[int]:
    value = config.get("eos_token_id")
    ids = [] if value is None else value if isinstance(value, list) else [value]
    for token_id in ids:
        if not _is_int(token_id) or not 0 <= token_id < vocab_size:
            raise ValueError(
                f"eos_token_id {_shown(token_id)} is not one of the vocabulary, which has {vocab_size} ids"
            )
    return frozenset(ids)


def _defaults(generation: dict) -> Defaults:
    """Return the defaults in generation_config.json, read as others do: temperature counts only if do_sample is set
    (transformers), and a top_k of -1 is no top_k (vLLM). Raises ValueError."""
    sampled = generation.get("do_sample")
    if sampled not in (None, True, False):
        raise ValueError(f"do_sample is {_shown(sampled)}, not true or false")
    sampling = SAMPLING_DEFAULTS | ({"temperature": 1.0} if sampled else {})
    for name, param in SAMPLING_PARAMS.items():
        if not param.in_model or (name == "temperature" and not sampled):
            continue
        if isinstance(param.default, int):
            sampling[name] = max(0, _integer(generation, name, param.default, least=-1))
        else:
            sampling[name] = _number(generation, name, sampling[name])
    named = generation.get("max_new_tokens") is not None
    return Defaults(sampling, max_tokens=_integer(generation, "max_new_tokens", 0, least=1) if named else None)


def _number(generation: dict, name: str, default: float) -> float:
    value = generation.get(name)
    if value is None:
        return default
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise ValueError(f"{name} is {_shown(value)}, not a number")
    if name == "temperature":
        value = settle_temperature(value)
    if problem := SAMPLING_PARAMS[name].range.problem(value):
        raise ValueError(f"{name} is {_shown(value)}, and {problem}")
    return float(value)


def _integer(generation: dict, name: str, default: int, least: int) -> int:
    value = generation.get(name)
    if value is None:
        return default
    if not _is_int(value) or not least <= value <= _MOST:
        raise ValueError(f"{name} is {_shown(value)}, not an integer from {least} to {_MOST}")
    return value


def _is_int(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _shown(value: object) -> str:
    return repr(value)[:40]


def _chat_templates(folder: Path, tokenizer_config: dict) -> dict[str, str]:
    """Return the chat templates by name, "default" among them if there is one. Files of their own come first, then
    tokenizer_config.json, then chat_template.json, which a multimodal model's processor has."""
    path, beside = folder / "chat_template.jinja", folder / "additional_chat_templates" / "tool_use.jinja"
    if found := {name: file for name, file in (("default", path), ("tool_use", beside)) if os.path.lexists(file)}:
        return {name: _read_text(file) for name, file in found.items()}
    with _named(folder / "tokenizer_config.json"):
        if templates := _templates(tokenizer_config.get("chat_template")):
            return templates
    of_processor = folder / "chat_template.json"
    with _named(of_processor):
        return _templates(_read_json(of_processor, optional=True).get("chat_template"))


def _templates(value: object) -> dict[str, str]:
    """Return the templates in a `chat_template` by name. Raises ValueError."""
    if value is None:
        return {}
    if not isinstance(value, list):
        value = [{"name": "default", "template": value}]
    elif not all(isinstance(entry, dict) and {"name", "template"} <= entry.keys() for entry in value):
        raise ValueError("chat_template is a list, and not of names and templates")
    for entry in value:
        if not isinstance(entry["name"], str) or not isinstance(entry["template"], str):
            raise ValueError(f"chat_template is {_shown(entry['template'])}, not a text")
    return {entry["name"]: entry["template"] for entry in value}


def _special_tokens(tokenizer_config: dict, special_map: dict) -> dict[str, str]:
    """Return the tokens that a chat template may name, from tokenizer_config.json and special_tokens_map.json. Raises
    ValueError."""
    # As transformers: files that list no added tokens are older ones, of which the map counts.
    is_new = "added_tokens_decoder" in tokenizer_config
    values = special_map | tokenizer_config if is_new else tokenizer_config | special_map
    more = values.get("extra_special_tokens")
    found: dict[str, str] = {}
    for name, value in (values | (more if isinstance(more, dict) else {})).items():
        text = value.get("content") if isinstance(value, dict) else value
        if isinstance(text, str):
            if text and name.endswith("_token"):
                found[name] = text
        elif value and name in _SPECIAL_NAMES:
            raise ValueError(f"{name} is {_shown(text)}, not a text")
    return found
