"""What a worker says once of each source of KV."""

import logging

from baton.worker.kv.intake import Intake
from kvtransfer.compatible import EXACT, MIXED
from kvtransfer.transfer.fetcher import FetchReport


def report(transport: str, numerics: str = EXACT) -> FetchReport:
    return FetchReport(1, 1, 1, transport, numerics, 0.1, 0.1, f"{transport}: the first of both")


def test_each_transport_of_a_source_and_mixed_numerics_are_said_once(caplog):
    caplog.set_level(logging.INFO)
    intake = Intake(None, None)
    for _ in range(3):
        for source in (b"a" * 16, b"b" * 16):
            intake._log_new(source, report("shm"))
            intake._log_new(source, report("tcp", MIXED))
    assert len(caplog.records) == 6


def test_sources_that_are_gone_are_forgotten():
    """A worker outlives many whose KV it pulled."""
    intake = Intake(None, None)
    for source in range(1000):
        intake._log_new(source.to_bytes(16, "big"), report("shm"))
    assert len(intake._logged) == 256
