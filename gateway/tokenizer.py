"""Text to token ids, as transformers does it, except that what users write never becomes a control token."""

import asyncio
import functools
import json
import re

import tokenizers

from baton.service.settings import SettingsError
from gateway.templates import Rendered

# Longer texts are encoded in a thread: about 1 ms of the event loop at most.
_INLINE_CHARS = 2048


class ControlTokenInContent(Exception):
    """The template moves content about in a way that leaves its control tokens no different from the template's."""


class Tokenizer:
    """One tokenizer.json. Immutable after the start, so threads may share it.

    A control token is one that the file calls special, or an added one that is written like a tag: <...> or [...].
    """

    def __init__(self, tokenizer_json: bytes, name: str = "tokenizer.json"):
        """Raises SettingsError when the file is not a tokenizer."""
        self._json = tokenizer_json
        self._normal = _load(tokenizer_json, name)
        self.added = {token["id"]: token for token in json.loads(tokenizer_json).get("added_tokens", ())}
        self._controls = {token["content"]: token for token in self.added.values() if _is_control(token)}
        alternatives = sorted(map(re.escape, self._controls), key=len, reverse=True)
        self._pattern = re.compile("|".join(alternatives)) if alternatives else re.compile(r"(?!)")
        self._normalizer = self._normal.normalizer
        self._normalizes = any(token.get("normalized") for token in self._controls.values())

    @property
    def special_ids(self) -> frozenset[int]:
        """Ids that are left out of text."""
        return frozenset(token_id for token_id, token in self.added.items() if token.get("special"))

    @property
    def decoder(self) -> tokenizers.Tokenizer:
        return self._normal

    async def encode_text(self, text: str) -> list[int]:
        """Token ids of a user's text, with the tokenizer's own special tokens (BOS) added."""
        return await self._run(len(text), self._encode_text, text)

    async def encode_chat(self, rendered: Rendered) -> list[int]:
        """Token ids of a rendered conversation. Raises ControlTokenInContent."""
        return await self._run(len(rendered.text), self._encode_chat, rendered)

    def can_fit(self, num_chars: int, num_tokens: int) -> bool:
        """False where no text of so many characters has so few tokens: that is known without encoding it."""
        return self._longest is None or num_chars <= num_tokens * self._longest

    @functools.cached_property
    def _longest(self) -> int | None:
        """Characters of the longest token; None where a token may stand for any number of them: one for all that is
        unknown, one that swallows the white space beside it, or a normalizer that makes text shorter."""
        content = json.loads(self._json)
        swallows = any(token.get("lstrip") or token.get("rstrip") for token in self.added.values())
        if self._normalizer or swallows or content["model"].get("unk_token") is not None:
            return None
        return max(map(len, self._normal.get_vocab()))

    def has_control(self, text: str) -> bool:
        """Whether `text` spells a control token, or could do so together with what stands beside it."""
        return any(control[:2] in text or text.endswith(control[0]) for control in self._controls)

    async def _run(self, num_chars: int, encode, value) -> list[int]:
        if num_chars <= _INLINE_CHARS:
            return encode(value)
        return await asyncio.to_thread(encode, value)

    def _encode_text(self, text: str) -> list[int]:
        tokenizer = self._plain if self._spells_control(text) else self._normal
        return tokenizer.encode(text).ids

    def _spells_control(self, text: str) -> bool:
        if self._normalizes and self._normalizer and self._pattern.search(self._normalizer.normalize_str(text)):
            return True
        return self._pattern.search(text) is not None

    def _encode_chat(self, rendered: Rendered) -> list[int]:
        text, spans = rendered
        if spans is None:
            raise ControlTokenInContent
        of_template = list(self._outside(text, spans))
        if len(of_template) == sum(1 for _ in self._pattern.finditer(text)):
            return self._normal.encode(text, add_special_tokens=False).ids
        return self._encode_around(text, of_template)

    def _outside(self, text: str, spans: tuple[tuple[int, int], ...]):
        """Matches of control tokens that touch no content."""
        position = 0
        while found := self._pattern.search(text, position):
            touched = any(begin < found.end() and found.start() < end for begin, end in spans)
            position = found.start() + 1 if touched else found.end()
            if not touched:
                yield found

    def _encode_around(self, text: str, of_template: list[re.Match]) -> list[int]:
        token_ids, position, strip = [], 0, False
        for found in of_template:
            control = self._controls[found[0]]
            token_ids += self._encode_plain(text[position : found.start()], strip, control.get("lstrip", False))
            token_ids.append(control["id"])
            position, strip = found.end(), control.get("rstrip", False)
        return token_ids + self._encode_plain(text[position:], strip, False)

    def _encode_plain(self, text: str, lstrip: bool, rstrip: bool) -> list[int]:
        text = text.lstrip() if lstrip else text
        text = text.rstrip() if rstrip else text
        return self._plain.encode(text, add_special_tokens=False).ids if text else []

    @functools.cached_property
    def _plain(self) -> tokenizers.Tokenizer:
        """Sees no control token in text. Made when the first text asks for it: a large vocabulary costs 100 MB."""
        content = json.loads(self._json)
        for token in content.get("added_tokens", ()):
            token["special"] = token.get("special", False) or _is_control(token)
        plain = _load(json.dumps(content).encode(), "tokenizer.json")
        plain.encode_special_tokens = True
        return plain


def _load(tokenizer_json: bytes, name: str) -> tokenizers.Tokenizer:
    try:
        tokenizer = tokenizers.Tokenizer.from_buffer(tokenizer_json)
    except Exception as error:  # the bindings raise bare Exception
        raise SettingsError(f"{name}: not a tokenizer: {' '.join(str(error).split())[:200]}") from None
    tokenizer.no_truncation()
    tokenizer.no_padding()
    return tokenizer


def _is_control(token: dict) -> bool:
    content = token["content"]
    return bool(content.strip()) and (token.get("special", False) or content[0] + content[-1] in ("<>", "[]"))
