"""`baton chat` against a stand-in for the gateway: from a pipe, and in a terminal of its own."""

import contextlib
import io
import os
import pty
import select
import signal
import subprocess
import sys
import time

import psutil
import pytest

from baton.cli.client.chat import TerminalChat
from baton.v1 import inference_pb2 as pb
from tests.support import waiting
from tests.support.launch.commands import run_closed
from tests.support.pace import patience
from tests.support.process import ROOT


def argv_of(gateway, *argv: str) -> list[str]:
    return [sys.executable, "-m", "baton.cli", "chat", "--target", gateway.target, *argv]


def said(request) -> list[tuple[str, str]]:
    return [(message.role, message.content) for message in request.messages.messages]


def test_from_a_pipe(gateway):
    argv = argv_of(gateway, "--system", "Be short.", "--max-tokens", "9")
    done = subprocess.run(argv, cwd=ROOT, input="one\n\ntwo\n", capture_output=True, text=True, timeout=patience(60))
    assert (done.returncode, done.stdout, done.stderr) == (0, "Größe\nGröße\n", "")
    first, second = gateway.requests[-2:]
    assert said(first) == [("system", "Be short."), ("user", "one")]
    assert said(second) == [*said(first), ("assistant", "Größe"), ("user", "two")]
    assert second.stopping.max_tokens == 9


def test_a_chat_whose_streams_are_closed_ends_well(gateway):
    assert run_closed("<&-", "chat", "--target", gateway.target) == (0, "")


def test_refused_from_a_pipe(gateway):
    argv = argv_of(gateway, "--max-tokens", "0")
    done = subprocess.run(argv, cwd=ROOT, input="one\ntwo\n", capture_output=True, text=True, timeout=patience(60))
    assert done.returncode == 1 and done.stderr.count("\n") == 1 and "stopping.max_tokens" in done.stderr


@pytest.mark.parametrize("errors", ["strict", "surrogateescape"])  # as the locale has it
def test_a_pipe_that_is_not_utf_8(gateway, errors):
    argv, env = argv_of(gateway), {**os.environ, "PYTHONIOENCODING": f"utf-8:{errors}"}
    done = subprocess.run(argv, cwd=ROOT, env=env, input=b"\xff\n", capture_output=True, timeout=patience(60))
    assert done.returncode == 2 and done.stderr.startswith(b"baton chat: stdin is not UTF-8: ")
    assert done.stderr.count(b"\n") == 1


class EndsAnswer(io.StringIO):
    """A terminal where Ctrl-C is pressed as soon as the first text is seen."""

    def flush(self):
        if self.getvalue() == "Grö":
            raise KeyboardInterrupt


class OneText:
    def stream(self, messages):
        return contextlib.nullcontext(iter([pb.GenerateResponse(text="Grö")]))


def test_what_was_seen_before_ctrl_c_is_kept():
    conversation = TerminalChat(OneText(), None, {}, is_terminal=True)
    with contextlib.redirect_stdout(EndsAnswer()) as terminal:
        conversation.say("hello")
    assert terminal.getvalue() == "Grö [ended]\n"
    assert conversation.messages[1:] == [{"role": "assistant", "content": "Grö"}]


def test_in_a_terminal(gateway):
    """Ctrl-C ends an answer, and drops a line that is being written; Ctrl-D ends the conversation."""
    ours, theirs = pty.openpty()
    # Where tests run in the background of a shell, Ctrl-C is ignored, and children would ignore it too.
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        child = subprocess.Popen(
            argv_of(gateway), cwd=ROOT, stdin=theirs, stdout=theirs, stderr=theirs, start_new_session=True
        )
    finally:
        signal.signal(signal.SIGINT, before)
    os.close(theirs)
    shown = b""

    def until(text: bytes) -> None:
        nonlocal shown
        deadline = time.monotonic() + patience(30)
        while text not in shown:
            assert time.monotonic() < deadline, f"{text} has not come, but {shown}"
            if select.select([ours], [], [], 0.2)[0]:
                shown += os.read(ours, 4096)
        shown = shown.partition(text)[2]

    def until_it_waits() -> None:  # Python loses an interrupt between the last character and its wait for the next
        child_process = psutil.Process(child.pid)
        waiting.until(lambda: child_process.status() == psutil.STATUS_SLEEPING, "it waits for no character")

    try:
        until(b"> ")
        os.write(ours, b"hello\n")
        until("Größe".encode())
        until(b"> ")
        os.write(ours, b"endless\n")
        until("Grö".encode())
        child.send_signal(signal.SIGINT)
        until(b"[ended]")
        until(b"> ")
        os.write(ours, b"again\n")
        until("Größe".encode())
        until(b"> ")
        os.write(ours, b"dropped")
        until(b"dropped")
        until_it_waits()
        child.send_signal(signal.SIGINT)
        until(b"> ")
        os.write(ours, b"\x04")
        assert child.wait(patience(30)) == 0
    finally:
        child.kill()
        os.close(ours)
    begun = [("user", "hello"), ("assistant", "Größe"), ("user", "endless")]
    assert said(gateway.requests[-1]) == [*begun, ("assistant", "Grö"), ("user", "again")]
