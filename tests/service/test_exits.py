"""What a program says as it ends."""

from baton.service.exits import FAILED, fail, one_line


def test_the_lines_of_a_crash_stay_lines(capsys):
    assert fail("baton up", RuntimeError("Traceback:\n  File x\nboom"), FAILED) == FAILED
    assert capsys.readouterr().err == "baton up: Traceback:\n  File x\nboom\n"


def test_an_error_of_several_lines_may_be_one():
    assert one_line(ValueError("cannot listen:\n  port 1\n")) == "cannot listen: port 1"
