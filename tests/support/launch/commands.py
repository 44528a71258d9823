"""`baton` commands as processes of their own, with the pipes that a shell gives them."""

import os
import subprocess
import sys

from tests.support.pace import patience


def run_unread(*argv: str) -> tuple[int, str]:
    """Run a command whose stdout nobody reads, and in which nothing is kept back, as Baton's images have it; return its
    status and what it says on stderr."""
    reader, writer = os.pipe()
    os.close(reader)
    try:
        done = subprocess.run(
            [sys.executable, "-u", "-m", "baton.cli", *argv],
            stdin=subprocess.DEVNULL,
            stdout=writer,
            stderr=subprocess.PIPE,
            text=True,
            timeout=patience(120),
        )
    finally:
        os.close(writer)
    return done.returncode, done.stderr


def run_closed(redirection: str, *argv: str) -> tuple[int, str]:
    """Run a command with a stream closed, `<&-` or `>&-`, as some who start daemons do; return its status and what it
    says on stderr."""
    done = subprocess.run(
        ["sh", "-c", f'exec "$@" {redirection}', "sh", sys.executable, "-m", "baton.cli", *argv],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
        timeout=patience(120),
    )
    return done.returncode, done.stderr
