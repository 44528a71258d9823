"""Texts from elsewhere, for instance a library's errors, on one line."""


def one_line(words: object, max_chars: int | None = None) -> str:
    """Return a text or an error's message on one line, its first `max_chars` characters if given."""
    return " ".join(str(words).split())[:max_chars]


def describe_error(error: BaseException, max_chars: int | None = None) -> str:
    """Return the class of an error and its message on one line, the message's first `max_chars` characters if given."""
    return f"{type(error).__name__}: {one_line(error, max_chars)}"
