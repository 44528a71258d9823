"""JSON as bytes, and the events of a stream: at once, or, where they are long, in turns of the event loop."""

import asyncio
import json
from collections.abc import Awaitable, Iterator
from typing import Any

Json = dict[str, Any]
Data = bytes | Awaitable[bytes]
"""What is sent: written at once, or while others run."""

COMMENT = b": \n\n"  # of a stream: readers of events pass over it
_AT_ONCE = 32  # tokens: 4 ms
_encode = json.JSONEncoder(ensure_ascii=False, separators=(",", ":")).encode
# They end a line to some readers of streams, as to Python's; JSON has them in strings alone.
_LINE_ENDS = {each: f"\\u{ord(each):04x}" for each in ("\x85", "\u2028", "\u2029")}


def to_text(value: Any) -> str:
    """Return the value as JSON, which is one line to whoever reads it."""
    text = _encode(value)
    if not text.isascii():
        for line_end, escaped in _LINE_ENDS.items():
            text = text.replace(line_end, escaped)
    return text


def to_bytes(value: Any) -> bytes:
    """Return the same as bytes. Half of a surrogate pair, which is no text, is escaped."""
    return to_text(value).encode(errors="backslashreplace")


async def to_bytes_in_turns(value: Any, num_levels: int = 4) -> bytes:
    """Return the same, of a value that may have iterators in place of lists on its first levels, and bytes that are
    JSON already; others run in between. Logprobs of 4,000 tokens with 20 alternatives each take 0.5 s, and an answer
    may have 16 times as many."""
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
    """Return the value as an event of a stream whose events have names."""
    return b"event: " + name.encode() + b"\ndata: " + to_bytes(value) + b"\n\n"


async def named_events_in_turns(events: list[Json], num_levels: int) -> bytes:
    """Return events, each named by its type, with values as `to_bytes_in_turns` takes them."""
    data = list[bytes]()
    for each in events:
        data += b"event: ", each["type"].encode(), b"\ndata: ", await to_bytes_in_turns(each, num_levels), b"\n\n"
    return b"".join(data)
