"""Turn token ids into text as they come; an incomplete character is held back.

Streamed choices and the Detokenize call use the same code, so their texts are equal. The bytes of a token are found
once and then looked up in a table.
"""

import codecs
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from copy import copy

from baton.v1 import inference_pb2 as pb
from gateway.text.tokenizer import Tokenizer

_BYTE_TOKEN = re.compile("<0x([0-9A-Fa-f]{2})>")
_STEP = 4096  # ids
_STRIDES = (1024, 32, 1)  # ids: steps of num_begun's search, from coarse to fine
LOOKED_AT = 64  # tokens at the head of a prompt: few begin with so many that have no text
_WORD = re.compile("[a-z]+")
NO_CHARACTERS: Mapping[int, str] = {}


class Detokenizer:
    """Make decoders for one tokenizer. Special tokens have no text."""

    def __init__(self, tokenizer: Tokenizer, characters: Mapping[int, str] = NO_CHARACTERS):
        """Make decoders for a tokenizer. `characters`: texts of some tokens, by id, in place of the tokenizer's."""
        self._characters = characters
        self._tokenizer, self._special_ids = tokenizer.decoder, tokenizer.special_ids
        self._is_byte_level = tokenizer.is_byte_level
        self._has_byte_tokens = "ByteFallback" in tokenizer.decoder_steps
        self._bytes, self._first_bytes = (
            _Bytes(bytes_of, self._knows) for bytes_of in (self.bytes_of, self._first_bytes_of)
        )
        self._word = [] if self._is_byte_level else self._find_word()
        self._len_before = len(self._decode(self._word))
        self._len_behind = len(self._decode(self._word * 2)) - self._len_before

    def decoder(self, continues: bool = False) -> "TextDecoder":
        """Return a decoder for one sequence. `continues`: the sequence continues an earlier text."""
        return TextDecoder(self._bytes, self._bytes if self._is_byte_level or continues else self._first_bytes)

    def has_text(self, token_ids: Sequence[int]) -> bool:
        """Return whether any of the first LOOKED_AT tokens has text."""
        return any(self._bytes[token_id] for token_id in token_ids[:LOOKED_AT])

    def decode(self, token_ids: Sequence[int]) -> str:
        """Return the text of a whole sequence, decoded in short steps so that other threads can run in between."""
        decoder = self.decoder()
        pieces = [decoder.push(token_ids[begin : begin + _STEP]) for begin in range(0, len(token_ids), _STEP)]
        return "".join(pieces) + decoder.finish()

    def num_begun(self, token_ids: Sequence[int], positions: Iterable[int], continues: bool = False) -> list[int]:
        """Return, for each of these positions of characters in a sequence's text, how many tokens begin before it.

        The positions must be in order. `continues`: as for `decoder`."""
        decoder, num_tokens, num_chars, counts = self.decoder(continues), 0, 0, list[int]()
        for position in positions:
            for size in _STRIDES:
                while num_chars < position and num_tokens < len(token_ids):
                    ahead, stride = copy(decoder), token_ids[num_tokens : num_tokens + size]
                    end = num_chars + len(ahead.push(stride))
                    if size > 1 and end >= position:
                        break
                    decoder, num_tokens, num_chars = ahead, num_tokens + len(stride), end
            counts.append(num_tokens)
        return counts

    def bytes_of(self, token_id: int) -> bytes:
        """Return the UTF-8 bytes of a token within a text; they may be a part of a character."""
        if token_id in self._characters:
            return self._characters[token_id].encode()
        token = None if token_id in self._special_ids else self._tokenizer.id_to_token(token_id)
        if token is None:
            return b""
        if self._is_byte_level:
            return _token_bytes(token)
        if (value := self._byte_of(token)) is not None:
            return value
        text = self._decode([*self._word, token_id, *self._word])
        return text[self._len_before : len(text) - self._len_behind].encode()

    def shown(self, token_id: int) -> tuple[str, bytes]:
        """Return the text and the bytes of a single token, or of its name if it is special and has no text."""
        raw = self._bytes[token_id] or self._name(token_id).encode()
        return raw.decode(errors="replace"), raw

    def token_text(self, token_id: int) -> pb.TokenText:
        """Return the bytes of a token within a text and as its first, or its name if it has no text."""
        text, first = self._bytes[token_id], (self._bytes if self._is_byte_level else self._first_bytes)[token_id]
        return pb.TokenText(text=text, first_text=first, name="" if text else self._name(token_id))

    def _name(self, token_id: int) -> str:
        return self._tokenizer.id_to_token(token_id) or ""

    def _first_bytes_of(self, token_id: int) -> bytes:
        """Return the UTF-8 bytes of a token that begins a text, where some tokenizers drop a leading space."""
        if token_id in self._characters:
            return self._characters[token_id].encode()
        text, value = self._decode([token_id]), self._byte_of(self._name(token_id))
        return text.encode() if value is None or not text else value

    def _knows(self, token_id: int) -> bool:
        return self._tokenizer.id_to_token(token_id) is not None

    def _byte_of(self, token: str) -> bytes | None:
        """Return the byte that a token such as <0x0A> stands for in a vocabulary with byte fallback, or None."""
        found = _BYTE_TOKEN.fullmatch(token) if self._has_byte_tokens else None
        return found and bytes.fromhex(found[1])

    def _find_word(self) -> list[int]:
        """Return one token that is a plain word, if there is one: between two of it, any token decodes as within a
        text."""
        for token_id in range(self._tokenizer.get_vocab_size()):
            if _WORD.fullmatch(self._decode([token_id])):
                return [token_id]
        return []

    def _decode(self, token_ids: Sequence[int]) -> str:
        return self._tokenizer.decode(token_ids, skip_special_tokens=True)


class _Bytes(dict[int, bytes]):
    """The bytes of tokens by id, computed when first needed. Ids outside the vocabulary, which clients may send, are
    not kept."""

    def __init__(self, bytes_of: Callable[[int], bytes], is_known: Callable[[int], bool]):
        self._bytes_of, self._is_known = bytes_of, is_known

    def __missing__(self, token_id: int) -> bytes:
        value = self._bytes_of(token_id)
        if self._is_known(token_id):
            self[token_id] = value
        return value


class TextDecoder:
    """Decode one sequence of tokens in pieces; the text does not depend on how the tokens are grouped."""

    __slots__ = ("_bytes", "_first", "_held")

    def __init__(self, bytes_of: Mapping[int, bytes], first: Mapping[int, bytes]):
        self._bytes, self._first = bytes_of, first  # `first`: in use until a token has had text
        self._held = b""  # the beginning of an incomplete character

    def push(self, token_ids: Sequence[int]) -> str:
        """Add tokens; return the text that they complete."""
        value = self._held
        if self._first is not self._bytes:
            begun = next((i for i, token_id in enumerate(token_ids) if self._bytes[token_id]), None)
            if begun is None:
                return ""
            value, token_ids = self._first[token_ids[begun]], token_ids[begun + 1 :]
            self._first = self._bytes
        value += b"".join(map(self._bytes.__getitem__, token_ids))
        text, num_read = codecs.utf_8_decode(value, "replace", False)
        self._held = value[num_read:]
        return text

    def finish(self) -> str:
        """Return the text that is left: an incomplete character becomes U+FFFD."""
        value, self._held = self._held, b""
        return value.decode(errors="replace")


def _byte_alphabet() -> dict[str, int]:
    """Return the byte that each of GPT-2's printable characters stands for."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [value for value in range(256) if value not in printable]
    return {chr(value): value for value in printable} | {chr(256 + i): value for i, value in enumerate(others)}


_BYTES = _byte_alphabet()


def _token_bytes(token: str) -> bytes:
    """Return the bytes of a byte-level token. A token with a character outside the alphabet was added as plain text."""
    try:
        return bytes([_BYTES[character] for character in token])
    except KeyError:
        return token.encode()
