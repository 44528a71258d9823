import os

import pytest

from kvtransfer.errors import ProtocolError
from kvtransfer.memory.region import Region


def test_two_mappings_of_one_memory():
    ours = Region.create(10_000)
    theirs = Region.map(ours.open_read_only(), 10_000)
    ours.memory[9_999] = 7
    assert theirs.memory[9_999] == 7 and theirs.memory.readonly
    theirs.close(), ours.close(), ours.close()


def test_the_size_of_a_region_never_changes():
    region = Region.create(4096)
    with pytest.raises(PermissionError):
        os.ftruncate(region.fd, 0)
    region.close()


def test_what_is_no_pool_is_refused(tmp_path):
    region = Region.create(4096)
    with pytest.raises(ProtocolError, match="4096 bytes, 8192 were announced"):
        Region.map(os.dup(region.fd), 8192)
    region.close()
    (tmp_path / "file").write_bytes(bytes(4096))
    with pytest.raises(ProtocolError):
        Region.map(os.open(tmp_path / "file", os.O_RDONLY), 4096)


def test_memory_stays_while_an_array_looks_into_it():
    region = Region.create(4096)
    view = memoryview(region.memory)
    region.close()
    view[0] = 1
    assert view[0] == 1


def test_a_region_needs_a_size():
    with pytest.raises(ValueError):
        Region.create(0)


def test_a_region_without_room_is_one_line():
    """One line that says for what: a worker shows it and ends."""
    with pytest.raises(OSError, match=r"^no room for KV of 1099511627776.0 MiB in memory: "):
        Region.create(1 << 60)
