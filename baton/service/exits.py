"""How a program ends: its exit statuses, and the one line on stderr that says why."""

import sys

FAILED, WRONG_USE = 1, 2


def fail(program: str, reason: object, status: int) -> int:
    """Say in one line on stderr why `program` ends, and return `status`."""
    print(f"{program}: {' '.join(str(reason).split())}", file=sys.stderr)
    return status
