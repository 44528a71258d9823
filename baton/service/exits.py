"""Exit statuses of a program, and its last line on stderr."""

import sys

FAILED, WRONG_USE = 1, 2


def fail(program: str, reason: object, status: int) -> int:
    """Print on stderr why `program` ends, and return `status`."""
    print(f"{program}: {reason}", file=sys.stderr)
    return status
