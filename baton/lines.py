"""Words of others on one line."""


def one_line(words: object, max_chars: int | None = None) -> str:
    """Return a text, or the words of an error, as of a library that writes several lines; of many the first."""
    return " ".join(str(words).split())[:max_chars]
