"""Token ids to text as they come: half a character is held back, half a stop string too.

What a choice's pieces join to and what Detokenize says are the same code, so they are the same text.
"""

import codecs
from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple, Protocol

from gateway.tokenizer import Tokenizer

# Tokens that may stay undecided where a decoder shows bytes only together; a UTF-8 character has at most four.
_MAX_HELD_TOKENS = 8


class TextDecoder(Protocol):
    """Text of one sequence of tokens."""

    def push(self, token_ids: Sequence[int]) -> str:
        """The text that is certain now and was not before."""

    def finish(self) -> str:
        """What is left: an unfinished character becomes U+FFFD."""


class Detokenizer:
    """Makes decoders for one tokenizer. Special tokens have no text."""

    def __init__(self, tokenizer: Tokenizer):
        self._tokenizer = tokenizer
        self._special_ids = tokenizer.special_ids
        self._is_byte_level = "ByteLevel" in str(type(tokenizer.decoder.decoder).__name__)
        self._bytes = _Bytes(self.bytes_of)

    def decoder(self) -> TextDecoder:
        return _ByteDecoder(self._bytes.__getitem__) if self._is_byte_level else _WindowDecoder(self._decode)

    def decode(self, token_ids: Iterable[int]) -> str:
        """The text of a whole sequence."""
        decoder = self.decoder()
        return decoder.push(list(token_ids)) + decoder.finish()

    def bytes_of(self, token_id: int) -> bytes:
        """The UTF-8 bytes that a byte-level token stands for; any bytes, not always whole characters."""
        token = None if token_id in self._special_ids else self._tokenizer.decoder.id_to_token(token_id)
        return b"" if token is None else _token_bytes(token)

    def _decode(self, token_ids: Sequence[int]) -> str:
        return self._tokenizer.decoder.decode(list(token_ids), skip_special_tokens=True)


class _Bytes(dict[int, bytes]):
    """Of the tokens that have come so far."""

    def __init__(self, bytes_of: Callable[[int], bytes]):
        self._bytes_of = bytes_of

    def __missing__(self, token_id: int) -> bytes:
        value = self[token_id] = self._bytes_of(token_id)
        return value


class _ByteDecoder:
    """Byte-level vocabularies: exact, whatever the tokens come with."""

    __slots__ = ("_bytes_of", "_held")

    def __init__(self, bytes_of: Callable[[int], bytes]):
        self._bytes_of = bytes_of
        self._held = b""  # of a character

    def push(self, token_ids: Sequence[int]) -> str:
        value = self._held + b"".join(map(self._bytes_of, token_ids))
        text, num_read = codecs.utf_8_decode(value, "replace", False)
        self._held = value[num_read:]
        return text

    def finish(self) -> str:
        value, self._held = self._held, b""
        return value.decode(errors="replace")


class _WindowDecoder:
    """Any other vocabulary (sentencepiece): decodes a window that begins a piece earlier, and takes the difference."""

    def __init__(self, decode):
        self._decode = decode
        self._token_ids: list[int] = []
        self._read = 0  # tokens of the window whose text was given out

    def push(self, token_ids: Sequence[int]) -> str:
        return "".join(map(self._push, token_ids))

    def _push(self, token_id: int) -> str:
        self._token_ids.append(token_id)
        text = self._new_text()
        if text.endswith("\ufffd") and len(self._token_ids) - self._read < _MAX_HELD_TOKENS:
            return ""
        if text:
            self._advance()
        return text

    def finish(self) -> str:
        text = self._new_text()
        self._advance()
        return text

    def _new_text(self) -> str:
        before = self._decode(self._token_ids[: self._read]) if self._read else ""
        return self._decode(self._token_ids)[len(before) :]

    def _advance(self) -> None:
        """The last piece stays as context: what a token looks like may depend on the one before."""
        self._token_ids = self._token_ids[self._read :]
        self._read = len(self._token_ids)


class Stopped(NamedTuple):
    text: str  # up to the match
    matched: str | None


class StopMatcher:
    """Finds the stop string that is complete first (of those that are so at once, the longest), across pieces."""

    def __init__(self, stops: Sequence[str]):
        self._stops = tuple(stops)
        self._held = ""

    def push(self, piece: str) -> Stopped:
        """The text that may go out; with `matched` set nothing comes after it."""
        if not self._stops or not piece:
            return Stopped(piece, None)
        text = self._held + piece
        found = [(text.find(stop) + len(stop), -len(stop), stop) for stop in self._stops if stop in text]
        if found:
            end, _, stop = min(found)
            self._held = ""
            return Stopped(text[: end - len(stop)], stop)
        keep = max(_overlap(text, stop) for stop in self._stops)
        self._held = text[len(text) - keep :]
        return Stopped(text[: len(text) - keep], None)

    def finish(self) -> str:
        """What was held back in vain."""
        held, self._held = self._held, ""
        return held


def _overlap(text: str, stop: str) -> int:
    """Length of the longest end of `text` that `stop` begins with."""
    for length in range(min(len(stop) - 1, len(text)), 0, -1):
        if text.endswith(stop[:length]):
            return length
    return 0


def _byte_alphabet() -> dict[str, int]:
    """GPT-2's printable stand-ins for all bytes."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [value for value in range(256) if value not in printable]
    return {chr(value): value for value in printable} | {chr(256 + i): value for i, value in enumerate(others)}


_BYTES = _byte_alphabet()


def _token_bytes(token: str) -> bytes:
    """A token with a character outside the alphabet was added as text."""
    try:
        return bytes([_BYTES[character] for character in token])
    except KeyError:
        return token.encode()
