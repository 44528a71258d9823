"""The part `abuse` of bench/overload.py sets its stack up as the tests of abuse do; a run of it takes minutes."""

import pytest

from bench.arms import overload_abuse
from bench.lib.report import Report
from tests.support.abuse.attacked_stack import AttackedStack


class Started(Exception):
    """The stack is set up, and would start."""


def test_the_stack_of_the_abuses_is_set_up(tmp_path, monkeypatch):
    def start(ground: AttackedStack):
        raise Started

    monkeypatch.setattr(AttackedStack, "__enter__", start)
    with pytest.raises(Started):
        overload_abuse.abuse(Report("python bench/overload.py", True), tmp_path, quick=True)
