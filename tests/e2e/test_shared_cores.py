"""Workers without a number of threads divide the cores of their host: whether they compute, and that they are gone, is
seen by others."""

import struct
import time

from baton.engine.core.shared_cores import FREE, IDLE, NUM_SLOTS
from tests.support.client import Client
from tests.support.pace import patience
from tests.support.stack import SLOW_STEPS, Stack

OPTIONS = ("--num-blocks", "160")


def test_workers_have_places_and_compute_in_them(model, fork_server, tmp_path):
    folder = tmp_path / "kv"
    folder.mkdir()

    def places() -> list[int]:
        path = next(folder.glob("baton-cores-*"))
        return [value for value in struct.unpack(f"{NUM_SLOTS}I", path.read_bytes()) if value != FREE]

    def comes(wanted) -> bool:
        ends_at = time.monotonic() + patience(10)
        while not wanted(places()):
            if time.monotonic() > ends_at:
                return False
            time.sleep(0.01)
        return True

    options = {"options": (*OPTIONS, "--kv-socket-dir", str(folder)), "env": {"OMP_NUM_THREADS": None}}
    with Stack(model, tmp_path / "stack", failpoints=True, fork_server=fork_server, **options) as stack:
        assert comes(lambda found: found == [IDLE, IDLE])
        client = Client(stack.target)
        with stack.decode[0].armed(SLOW_STEPS):
            stream = client.stream(list(range(5, 105)), temperature=0.0, max_tokens=60, ignore_eos=True)
            next(iter(stream))
            assert comes(lambda found: len(found) == 2 and max(found) > IDLE)
            for _ in stream:
                pass
        assert comes(lambda found: found == [IDLE, IDLE])
        stack.decode[0].kill()
        assert comes(lambda found: len(found) == 2), "its place waits for the next look of another one that computes"
        stack.restart(stack.decode[0])
        client.generate(list(range(205, 305)), temperature=0.0, max_tokens=4)
        assert comes(lambda found: found == [IDLE, IDLE])
        client.close()
    assert places() == [], "who goes leaves"


def test_workers_with_a_number_of_threads_have_none(model, fork_server, tmp_path):
    folder = tmp_path / "kv"
    folder.mkdir()
    options = {
        "options": (*OPTIONS, "--threads", "1", "--kv-socket-dir", str(folder)),
        "env": {"OMP_NUM_THREADS": None},
    }
    with Stack(model, tmp_path / "stack", num_prefill=0, fork_server=fork_server, **options):
        assert not list(folder.glob("baton-cores-*"))
