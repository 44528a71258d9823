"""Encode JSON and events of a stream: at once, or in steps between which other calls run, if they are long."""

import asyncio
import json
from collections.abc import Awaitable, Iterator
from typing import Any

Json = dict[str, Any]
Data = bytes | Awaitable[bytes]
"""Bytes to send, or an awaitable that encodes them while other calls run."""

COMMENT = b": \n\n"  # an event that readers of a stream ignore
_AT_ONCE = 32  # tokens: 4 ms
_encode = json.JSONEncoder(ensure_ascii=False, separators=(",", ":")).encode
# Characters that end a line for some readers of streams, as in Python; JSON has them in strings only.
_LINE_ENDS = {each: f"\\u{ord(each):04x}" for each in ("\x85", "\u2028", "\u2029")}


def to_text(value: Any) -> str:
    """Return the value as JSON that any reader takes for one line."""
    text = _encode(value)
    if not text.isascii():
        for line_end, escaped in _LINE_ENDS.items():
            text = text.replace(line_end, escaped)
    return text


def to_bytes(value: Any) -> bytes:
    """Return the value as JSON in bytes. Half of a surrogate pair, which has no encoding, is escaped."""
    return to_text(value).encode(errors="backslashreplace")


async def to_bytes_in_turns(value: Any, num_levels: int = 4) -> bytes:
    """Return the value as JSON in bytes, encoded in steps between which other calls run. Its first `num_levels` levels
    may have iterators in place of lists, and bytes that are JSON already. Logprobs of 4,000 tokens with 20 alternatives
    each take 0.5 s, and an answer may have 16 times as many."""
    if isinstance(value, bytes):
        return value
    if isinstance(value, Iterator):
        elements = list[bytes]()
        for each in value:
            elements.append(to_bytes(each))
            if len(elements) % _AT_ONCE == 0:
                await asyncio.sleep(0)
        return b"[" + b",".join(elements) + b"]"
    if num_levels and isinstance(value, dict):
        pairs = [to_bytes(name) + b":" + await to_bytes_in_turns(each, num_levels - 1) for name, each in value.items()]
        return b"{" + b",".join(pairs) + b"}"
    if num_levels and isinstance(value, list) and value and isinstance(value[0], dict):
        return b"[" + b",".join([await to_bytes_in_turns(each, num_levels - 1) for each in value]) + b"]"
    return to_bytes(value)


def with_lists(value: Any) -> Any:
    """Return the value with lists in place of iterators."""
    if isinstance(value, dict):
        return {name: with_lists(each) for name, each in value.items()}
    return list(map(with_lists, value)) if isinstance(value, list | Iterator) else value


def event(value: Json) -> bytes:
    """Return the value as an event of a stream."""
    return b"data: " + to_bytes(value) + b"\n\n"


def named_event(name: str, value: Json) -> bytes:
    """Return the value as an event of this name."""
    return b"event: " + name.encode() + b"\ndata: " + to_bytes(value) + b"\n\n"


async def named_events_in_turns(events: list[Json], num_levels: int) -> bytes:
    """Return events, each named by its type, encoded as by `to_bytes_in_turns`."""
    data = list[bytes]()
    for each in events:
        data += b"event: ", each["type"].encode(), b"\ndata: ", await to_bytes_in_turns(each, num_levels), b"\n\n"
    return b"".join(data)
