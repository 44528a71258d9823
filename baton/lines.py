"""Texts from elsewhere, such as a library's errors, on one line."""


def one_line(text: object, max_chars: int | None = None) -> str:
    """Return a text or an error's message on one line, its first `max_chars` characters if given."""
    return " ".join(str(text).split())[:max_chars]


def describe_error(error: BaseException, max_chars: int = 120) -> str:
    """Return the message of an error on one line, or the name of its type if it has none."""
    return one_line(error, max_chars) or type(error).__name__
