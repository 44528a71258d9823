"""Texts from elsewhere, for instance a library's errors, on one line."""


def one_line(words: object, max_chars: int | None = None) -> str:
    """Return a text or an error's message on one line, its first `max_chars` characters if given."""
    return " ".join(str(words).split())[:max_chars]
