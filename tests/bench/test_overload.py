"""The part `abuse` of bench/overload.py sets its stack up as the tests of abuse do; a run of it takes minutes."""

import pytest

from bench.arms import overload_abuse
from bench.lib.report import Report
from tests.support.abuse.ground import Ground


class Started(Exception):
    """The stack is set up, and would start."""


def test_the_stack_of_the_abuses_is_set_up(tmp_path, monkeypatch):
    def start(ground: Ground):
        raise Started

    monkeypatch.setattr(Ground, "__enter__", start)
    with pytest.raises(Started):
        overload_abuse.abuse(Report("python bench/overload.py", True), tmp_path, quick=True)
