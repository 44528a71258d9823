"""Decide whether progress bars are drawn."""


def bar_disabled(progress: bool) -> bool | None:
    """Return tqdm's `disable` for a wanted or unwanted bar. None lets tqdm disable it if stderr is no terminal."""
    return None if progress else True
