"""Reference results of text work, computed as simply as possible and at any cost."""

import re


def control_tokens(text: str, controls) -> list[tuple[int, int]]:
    """Return the control tokens in a text: leftmost, of those at one place the longest, none over another."""
    found, position = [], 0
    while position < len(text):
        here = [control for control in controls if text.startswith(control, position)]
        longest = max(map(len, here), default=0)
        if longest:
            found.append((position, position + longest))
        position += longest or 1
    return found


def stopped(text: str, stops) -> tuple[str, str | None]:
    """Return the text before the stop string that is complete first, of those the longest, and which one it is."""
    for end in range(1, len(text) + 1):
        here = [stop for stop in stops if text[:end].endswith(stop)]
        if here:
            stop = max(here, key=len)
            return text[: end - len(stop)], stop
    return text, None


def held_back(text: str, stops) -> str:
    """Return the longest end of text that a stop string begins with, and is not."""
    for begin in range(len(text)):
        if any(stop.startswith(text[begin:]) and stop != text[begin:] for stop in stops):
            return text[begin:]
    return ""


def sentencepiece_text(tokens, strips_space: bool = True) -> str:
    """Return the text of ordinary tokens: bytes join to characters, invalid ones become U+FFFD."""
    value = b""
    for token in tokens:
        byte = re.fullmatch("<0x([0-9A-F]{2})>", token)
        value += bytes.fromhex(byte[1]) if byte else token.replace("\u2581", " ").encode()
    text = value.decode(errors="replace")
    return text.removeprefix(" ") if strips_space else text
