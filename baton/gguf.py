"""The header of a .gguf file: metadata and offsets of the tensors. Plain Python, for gateway, worker and engine alike.

Format: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md. The `gguf` package's reader makes a numpy array of
every word of the vocabulary: 39 s and 617 MB for 128k tokens and 280k merges on a busy machine. Here an array of
strings is only skipped, and decoded on request: 0.1 s and 8 MB."""

import hashlib
import mmap
import struct
from pathlib import Path
from typing import Any, NamedTuple

from baton.model_files import why_not_itself

MAGIC, VERSIONS = b"GGUF", (2, 3)
MAX_DIMENSIONS = 4
ALIGNMENT = 32  # in bytes, of every tensor, if general.alignment is missing
# Value types by number: struct's letter; 8 is a string, 9 an array.
SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
STRING, ARRAY = 8, 9
TOKENIZER = "tokenizer."
CONTROL, USER_DEFINED = 3, 4  # token types
# What ends a text: the ids that a file names, and control tokens by their text, since most files name only one of
# several. The texts are those of llama.cpp's llama-vocab.cpp; user-defined tokens count too, since converters give
# added tokens that are not special this type.
_END_KEYS = tuple(f"tokenizer.ggml.{name}_token_id" for name in ("eos", "eot", "eom"))
_END_TEXTS = frozenset((
    "<|eot_id|>", "<|eom_id|>", "<|end_of_text|>", "<|im_end|>", "<|endoftext|>", "<|end|>", "</s>", "<EOT>",
    "<end_of_turn>", "<end_of_utterance>",
))  # fmt: skip
_INTEGERS, _FLOATS, _BOOL = frozenset((0, 1, 2, 3, 4, 5, 10, 11)), frozenset((6, 12)), 7


def is_gguf(path: Path) -> bool:
    """Return whether a path names a .gguf file."""
    return path.suffix == ".gguf"


class GGUFError(Exception):
    """The file is not a complete GGUF file; one line that names it."""


class TensorInfo(NamedTuple):
    shape: tuple[int, ...]  # rows first
    type_id: int  # of ggml_type
    offset: int  # bytes from the start of the file


class _Value(NamedTuple):
    type_id: int
    begin: int  # bytes from the start of the file
    end: int


class Kind(NamedTuple):
    """The type that a value must have: one of `scalars`, or an array of `items`."""

    name: str
    scalars: frozenset[int] = frozenset()
    items: frozenset[int] = frozenset()


INTEGER, INTEGERS = Kind("an integer", _INTEGERS), Kind("a list of integers", items=_INTEGERS)
INTEGER_OR_EACH = Kind("an integer, or a list of one a layer", _INTEGERS, _INTEGERS)
NUMBER = Kind("a number", _INTEGERS | _FLOATS)
NUMBERS = Kind("a list of numbers", items=NUMBER.scalars)
FLAG = Kind("true or false", frozenset((_BOOL,)))
TEXT, TEXTS = Kind("a string", frozenset((STRING,))), Kind("a list of strings", items=frozenset((STRING,)))


class GGUFHeader:
    """The header of one file: `tensors` by name; `get(key, kind)` decodes a metadata value."""

    def __init__(self, path: Path):
        """Read the header. Raises GGUFError if it is not complete."""
        self.path = path
        self.tensors: dict[str, TensorInfo] = {}
        self._values: dict[str, _Value] = {}
        self._position = 0
        try:
            with open(path, "rb") as file:
                self._data = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
            self._read()
        except OSError as error:
            raise GGUFError(f"{path}: {why_not_itself(path) or error.strerror}") from None
        except (struct.error, ValueError, KeyError, OverflowError, IndexError) as error:
            reason = why_not_itself(path) or f"truncated or not a GGUF file ({error})"
            raise GGUFError(f"{path}: {reason}") from None

    def get(self, key: str, kind: Kind, default: Any = None) -> Any:
        """Return a metadata value; `default` if the file has none. Raises GGUFError for a value of another kind."""
        value = self._values.get(key)
        if value is None:
            return default
        self._position = value.begin
        item_type = self._number("I") if value.type_id == ARRAY else None
        if value.type_id not in kind.scalars and item_type not in kind.items:
            raise GGUFError(f"{self.path}: {key} is not {kind.name}")
        self._position = value.begin
        try:
            return self._decode(value.type_id)
        except UnicodeDecodeError:
            raise GGUFError(f"{self.path}: {key} is not UTF-8") from None

    @property
    def tokenizer_digest(self) -> bytes:
        """SHA-256 of everything that the file says of its tokenizer, on which gateways and workers must agree."""
        digest = hashlib.sha256()
        for key, value in sorted(self._values.items()):
            if key.startswith(TOKENIZER):
                digest.update(key.encode() + b"\0")
                digest.update(self._data[value.begin : value.end])
        return digest.digest()

    def end_ids(self, vocab_size: int) -> frozenset[int]:
        """Return the ids that end a text. Raises GGUFError if the file names one outside the vocabulary."""
        named = {key: self.get(key, INTEGER, -1) for key in _END_KEYS}  # -1: none
        if wrong := next((key for key, token_id in named.items() if not -1 <= token_id < vocab_size), None):
            why = f"{named[wrong]} is not one of the vocabulary, which has {vocab_size} ids"
            raise GGUFError(f"{self.path}: {wrong} {why}")
        tokens, types = (
            self.get("tokenizer.ggml.tokens", TEXTS, ()),
            self.get("tokenizer.ggml.token_type", INTEGERS, ()),
        )
        of_types = (CONTROL, USER_DEFINED)
        written = {
            at for at, (token, type_) in enumerate(zip(tokens, types)) if type_ in of_types and token in _END_TEXTS
        }
        return frozenset(each for each in {*named.values(), *written} if 0 <= each < vocab_size)

    def _read(self) -> None:
        if self._take(4) != MAGIC:
            raise ValueError("it does not begin with GGUF")
        version = self._number("I")
        if version not in VERSIONS:
            raise ValueError(f"version {version} is not supported, one of {', '.join(map(str, VERSIONS))}")
        num_tensors, num_values = self._number("Q"), self._number("Q")
        for _ in range(num_values):
            key, type_id = self._string(), self._number("I")
            begin = self._position
            self._skip(type_id)
            self._values[key] = _Value(type_id, begin, self._position)
        tensors = [self._tensor() for _ in range(num_tensors)]
        self._lay_out(tensors, self._position)

    def _tensor(self) -> tuple[str, TensorInfo]:
        """Return the name and info of the next tensor; its offset is still relative to the data."""
        name, num_dimensions = self._string(), self._number("I")
        if num_dimensions > MAX_DIMENSIONS:
            raise ValueError(f"tensor {name} has {num_dimensions} dimensions")
        shape = tuple(self._number("Q") for _ in range(num_dimensions))
        return name, TensorInfo(shape[::-1], self._number("I"), self._number("Q"))

    def _lay_out(self, tensors: list[tuple[str, TensorInfo]], header_bytes: int) -> None:
        alignment = self.get("general.alignment", INTEGER, ALIGNMENT)
        if alignment < 1 or alignment & (alignment - 1):
            raise ValueError(f"general.alignment {alignment} is not a power of two")
        begin = -(-header_bytes // alignment) * alignment
        for name, info in tensors:
            if name in self.tensors:
                raise ValueError(f"tensor {name} is there twice")
            self.tensors[name] = info._replace(offset=begin + info.offset)

    def _decode(self, type_id: int):
        if type_id == STRING:
            return self._string()
        if type_id != ARRAY:
            return self._number(SCALARS[type_id])
        inner, count = self._number("I"), self._number("Q")
        if inner in SCALARS:
            layout = f"<{count}{SCALARS[inner]}"
            return list(struct.unpack(layout, self._take(struct.calcsize(layout))))
        return [self._decode(inner) for _ in range(count)]

    def _skip(self, type_id: int) -> None:
        if type_id in SCALARS:
            self._take(struct.calcsize(SCALARS[type_id]))
        elif type_id == STRING:
            self._skip_strings(1)
        elif type_id == ARRAY:
            self._skip_array(self._number("I"), self._number("Q"))
        else:
            raise ValueError(f"value of type {type_id}")

    def _skip_array(self, inner: int, count: int) -> None:
        if inner in SCALARS:
            self._take(count * struct.calcsize(SCALARS[inner]))
        elif inner == STRING:
            self._skip_strings(count)
        else:
            raise ValueError(f"array of type {inner}")

    def _skip_strings(self, count: int) -> None:
        data, position, size = self._data, self._position, len(self._data)
        unpack = struct.Struct("<Q").unpack_from
        for _ in range(count):
            position += 8 + unpack(data, position)[0]
            if position > size:
                raise ValueError("a string ends beyond the file")
        self._position = position

    def _string(self) -> str:
        return self._take(self._number("Q")).decode()

    def _number(self, kind: str):
        (value,) = struct.unpack("<" + kind, self._take(struct.calcsize(kind)))
        return value

    def _take(self, num_bytes: int) -> bytes:
        begin, self._position = self._position, self._position + num_bytes
        if self._position > len(self._data):
            raise ValueError("it ends within its header")
        return self._data[begin : self._position]
