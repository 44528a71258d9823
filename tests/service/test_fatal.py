"""A worker that is refused memory ends, one that fails otherwise does not."""

import os

import pytest

from baton.service.fatal import exit_for_lost_device, exit_if_out_of_memory


def test_only_a_lack_of_memory_ends_the_worker(monkeypatch, caplog):
    ended = []
    monkeypatch.setattr(os, "_exit", ended.append)
    monkeypatch.setattr("logging.shutdown", lambda: None)
    exit_if_out_of_memory(RuntimeError("something else"))
    assert not ended and not caplog.records
    exit_if_out_of_memory(MemoryError())
    assert ended == [1]
    assert "--num-blocks" in caplog.records[-1].getMessage()


def test_a_lost_device_ends_the_worker(monkeypatch, caplog):
    ended = []
    monkeypatch.setattr(os, "_exit", ended.append)
    monkeypatch.setattr("logging.shutdown", lambda: None)
    exit_for_lost_device("CUDA error: an illegal memory access was encountered")
    assert ended == [1] and "illegal memory access" in caplog.records[-1].getMessage()


def test_a_fatal_error_ends_the_process_though_nothing_can_be_logged(monkeypatch):
    def refuse(*args):
        raise MemoryError

    ended = []
    monkeypatch.setattr(os, "_exit", ended.append)
    monkeypatch.setattr("baton.service.fatal.log.log", refuse)
    with pytest.raises(MemoryError):  # the process would be gone
        exit_if_out_of_memory(MemoryError())
    assert ended == [1]
