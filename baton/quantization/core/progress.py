"""Say where progress bars are drawn."""


def bar_disabled(progress: bool) -> bool | None:
    """Return `disable` of tqdm for a bar that is wanted or not. None is tqdm's word for where stderr is no terminal."""
    return None if progress else True
