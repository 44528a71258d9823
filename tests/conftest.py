"""Rules for all tests: a time limit that nothing outlasts, and a table at the end of the injected faults and their
outcomes."""

import atexit
import faulthandler
import gc
import json
import logging
import os
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import settings

from baton.engine.core.reproducible import fix_order_of_sums
from baton.service import fatal
from tests.support import pace
from tests.support.faults.case_table import lines

# Until all tests are collected: the collector would look 28 times through a million objects that stay, 7 s in each
# worker.
gc.disable()
fix_order_of_sums()  # before any test multiplies
os.environ["OTEL_BSP_SCHEDULE_DELAY"] = "1000"  # tests wait for spans, which are sent each 5 s
settings.register_profile("untimed", deadline=None)  # its own 200 ms an example fail on a busy machine
settings.load_profile("untimed")
HERE = Path(__file__).parent
SHARING = ("e2e", "faults")  # folders whose tests share stacks
GRACE_S = 60  # for a test to end once its time is up
STDERR = pytest.StashKey[int]()  # a descriptor: pytest takes the usual one away while tests run


def pytest_addoption(parser) -> None:
    parser.addoption("--every", type=int, default=1, metavar="N", help="run each N-th test of those that were chosen")


def pytest_configure(config) -> None:
    config.stash[STDERR] = os.dup(2)
    # Where a worker ends the test's own process, what pytest has captured is lost with it.
    fatal.log.addHandler(logging.StreamHandler(os.fdopen(config.stash[STDERR], "w", closefd=False)))
    pace.slowness()  # before pytest starts its workers, which inherit it


@pytest.hookimpl(optionalhook=True)  # of pytest-xdist
def pytest_xdist_make_scheduler(config, log):
    from tests.runner.file_scheduling import LastingFileScheduling

    return LastingFileScheduling(config, log) if config.getvalue("dist") == "loadfile" else None


@pytest.hookimpl(trylast=True)  # behind -m and -k
def pytest_collection_modifyitems(config, items) -> None:
    items[:] = _in_order(items[:: config.getoption("every")])
    usual_s = config.getvalue("timeout") or float(config.getini("timeout"))
    for item in items:
        own = item.get_closest_marker("timeout")
        item.add_marker(pytest.mark.timeout(pace.patience(own.args[0] if own else usual_s)), append=False)


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_protocol(item) -> Iterator[None]:
    _bound(item)
    try:
        return (yield)
    finally:
        faulthandler.cancel_dump_traceback_later()


@pytest.hookimpl(trylast=True)  # behind pytest, which takes a bound for unwanted once a test has failed
def pytest_exception_interact(node) -> None:
    if isinstance(node, pytest.Item):
        _bound(node)


def _bound(item: pytest.Item) -> None:
    """What its time limit does not end, native code and fixtures that wait for ever, ends with its process, which says
    where each thread stood; pytest goes on with another. One such test took all 90 minutes of a run, without a word."""
    limit_s = item.get_closest_marker("timeout").args[0]
    faulthandler.dump_traceback_later(limit_s + pace.patience(GRACE_S), exit=True, file=item.config.stash[STDERR])


def _in_order(items: list[pytest.Item]) -> list[pytest.Item]:
    """Folders whose tests share stacks first, each at one go: idle until the end, their workers took 300 s of CPU of
    4,980 (two slow AVX2 cores). Then files with many tests: small ones fill the gaps at the end."""
    num_tests = Counter(item.path for item in items)

    def place(path: Path) -> tuple[int, int]:
        folder = next((n for n, name in enumerate(SHARING) if path.is_relative_to(HERE / name)), len(SHARING))
        return folder, -num_tests[path]

    places = {path: place(path) for path in num_tests}
    return sorted(items, key=lambda item: places[item.path])


def pytest_collection_finish() -> None:
    gc.collect()
    gc.freeze()
    gc.enable()


def pytest_sessionfinish() -> None:
    # Modules too are to be collected when Python ends: nanobind complains of those that are not. Behind pytest, which
    # collects five times before.
    atexit.register(gc.unfreeze)


def pytest_report_header() -> str:
    return f"time limits: {pace.slowness():.1f} times what is written"


def pytest_terminal_summary(terminalreporter) -> None:
    reports = [report for group in terminalreporter.stats.values() for report in group]
    told = [
        value
        for report in reports
        if getattr(report, "when", "") == "teardown"
        for name, value in report.user_properties
        if name == "fault case"
    ]
    if told:
        terminalreporter.section("faults")
        for line in lines([json.loads(value) for value in dict.fromkeys(told)]):
            terminalreporter.write_line(line)


@pytest.fixture(scope="session")
def fork_server(tmp_path_factory):
    """What workers and gateways are forked from: torch and Baton's own modules take a worker 1.9 s of CPU to import.
    Starts themselves are tested in tests/e2e and tests/cli."""
    from tests.support.fork_server.processes import ForkServer

    with ForkServer(tmp_path_factory.mktemp("fork_server")) as fork_server:
        yield fork_server


@pytest.fixture(scope="module")
def forked_ranks(fork_server):
    """Ranks of engines in this process are forked from it too."""
    from baton.engine.ranks import process
    from tests.support.fork_server.processes import ForkedRanks

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(process, "subprocess", ForkedRanks(fork_server))
        yield


@pytest.fixture
def fast_switches():
    """Threads take turns as often as they can."""
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    yield
    sys.setswitchinterval(before)
