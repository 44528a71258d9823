"""Text of others on one line."""

from baton.lines import describe_error, one_line


def test_an_error_of_several_lines_is_one():
    assert one_line(ValueError("cannot listen:\n  port 1\n")) == "cannot listen: port 1"


def test_of_many_words_the_first_are_left():
    assert one_line("cannot\nlisten", 8) == "cannot l"


def test_an_error_without_a_message_is_described_by_its_type():
    assert describe_error(TimeoutError()) == "TimeoutError"
    assert describe_error(ValueError("cannot\nlisten"), 8) == "cannot l"
