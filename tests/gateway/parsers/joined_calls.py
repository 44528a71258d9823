"""Calls that parsers give out in parts, put together."""

from collections.abc import Iterable

from gateway.parsers.calls import CallPart


def joined(parts: Iterable[CallPart]) -> list[CallPart]:
    """Each call in one part, those that went wrong among them."""
    calls = list[CallPart]()
    for part in parts:
        if part.name:
            calls.append(part)
        else:
            assert not calls[-1].is_last
            calls[-1] = CallPart(calls[-1].name, calls[-1].arguments + part.arguments, part.is_last)
    return calls
