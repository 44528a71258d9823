"""Read the prompts whose KV all tenants share, because the operator says that they hold nothing private.

    texts = ["The beginning of every prompt of this application ..."]
    systems = ["You are a helpful assistant ..."]        # contents of system messages, for the model's chat template

Only their full spans of 64 tokens are shared. Any client can find out whether one was used recently.
"""

import itertools
import tomllib
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path

from baton.service.errors import InvalidRequest
from baton.service.settings import SettingsError
from gateway.text.prompt_input import PromptInput
from gateway.text.templates import ChatMessage, Conversation

Encode = Callable[[PromptInput], Awaitable[Sequence[int]]]


async def read_public_prefixes(path: Path, encode: Encode) -> list[Sequence[int]]:
    """Return the token ids of each prefix in the file. Raises SettingsError: one line."""
    try:
        table = tomllib.loads(path.read_text())
    except OSError as error:
        raise SettingsError(f"--public-prefixes {path}: {error.strerror}") from None
    except ValueError as error:
        raise SettingsError(f"--public-prefixes {path}: not TOML: {error}") from None
    texts, systems = table.pop("texts", []), table.pop("systems", [])
    if table or not (_is_list(texts) and _is_list(systems)):
        raise SettingsError(f"--public-prefixes {path}: may contain only `texts` and `systems`, lists of strings")
    try:
        return [await encode(PromptInput(text=text)) for text in texts] + [
            await _head(text, encode) for text in systems
        ]
    except InvalidRequest as error:
        raise SettingsError(f"--public-prefixes {path}: {error.message}") from None


def _is_list(value: object) -> bool:
    """Return whether this is a list of non-empty strings. A string alone would make each of its letters a prefix."""
    return isinstance(value, list) and all(isinstance(text, str) and text for text in value)


async def _head(system: str, encode: Encode) -> list[int]:
    """Return the token ids with which all conversations under this system message begin."""
    asked = [Conversation((ChatMessage("system", system), ChatMessage("user", word))) for word in ("a", "Why")]
    first, second = [await encode(PromptInput(messages=messages)) for messages in asked]
    return [one for one, other in itertools.takewhile(lambda pair: pair[0] == pair[1], zip(first, second))]
