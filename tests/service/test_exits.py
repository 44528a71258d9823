"""What a program says as it ends."""

from baton.service.exits import FAILED, fail


def test_the_lines_of_a_crash_stay_lines(capsys):
    assert fail("baton up", RuntimeError("Traceback:\n  File x\nboom"), FAILED) == FAILED
    assert capsys.readouterr().err == "baton up: Traceback:\n  File x\nboom\n"
