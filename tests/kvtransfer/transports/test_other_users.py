"""Another user of the host: shared memory is closed to it, and it cannot pose as a source."""

import asyncio
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from kvtransfer import errors
from kvtransfer.transports import shm, socket_folder
from tests.support.kvtransfer.rig import assert_still_serves, running

NOBODY = 65534
pytestmark = pytest.mark.skipif(os.geteuid() != 0, reason="only root can become another user")

BECOME_NOBODY = f"""
import json, os, signal, socket, sys
os.setgroups([]); os.setgid({NOBODY}); os.setuid({NOBODY})
"""
TRY_ALL = """
folder, pid, fd = sys.argv[1:]
acts = {
    "nothing": os.getuid,
    "list": lambda: os.listdir(folder),
    "stat": lambda: os.stat(folder + "/kv"),
    "connect": lambda: socket.socket(socket.AF_UNIX).connect(folder + "/kv"),
    "bind": lambda: socket.socket(socket.AF_UNIX).bind(folder + "/mine"),
    "rename": lambda: os.rename(folder, folder + "x"),
    "remove": lambda: os.rmdir(folder),
    "loosen": lambda: os.chmod(folder, 0o777),
    "descriptors": lambda: os.listdir(f"/proc/{pid}/fd"),
    "pool": lambda: os.open(f"/proc/{pid}/fd/{fd}", os.O_RDONLY),
    "mappings": lambda: os.listdir(f"/proc/{pid}/map_files"),
    "memory": lambda: os.open(f"/proc/{pid}/mem", os.O_RDONLY),
}
came = {}
for name, act in acts.items():
    try:
        came[name] = repr(act())
    except OSError as error:
        came[name] = type(error).__name__
print(json.dumps(came))
"""
LISTEN = """
sock = socket.socket(socket.AF_UNIX)
sock.bind(sys.argv[1])
sock.listen()
print("listening", flush=True)
signal.pause()
"""


def test_another_user_sees_nothing_of_shared_memory():
    async def main():
        async with running("shm") as rig:
            address = next(end.address for end in rig.source.endpoints() if end.transport == "shm")
            where = socket_folder.default_parent() / Path(address).parent
            assert where.stat().st_mode & 0o777 == 0o700
            named = (str(where), str(os.getpid()), str(rig.regions[0].fd))
            command = (sys.executable, "-c", BECOME_NOBODY + TRY_ALL, *named)
            done = await asyncio.to_thread(subprocess.run, command, capture_output=True, check=True, timeout=60)
            came = json.loads(done.stdout)
            assert came.pop("nothing") == str(NOBODY), "it runs as that user"
            assert came == dict.fromkeys(came, "PermissionError")
            await assert_still_serves(rig)

    asyncio.run(main())


async def test_a_socket_of_another_user_is_no_source():
    """A folder of the name that a source had which is gone: root could enter it, and be given other KV."""
    with tempfile.TemporaryDirectory(prefix="baton-kv-", dir=socket_folder.default_parent()) as where:
        os.chown(where, NOBODY, NOBODY)
        command = (sys.executable, "-c", BECOME_NOBODY + LISTEN, f"{where}/{socket_folder.SOCKET}")
        listener = subprocess.Popen(command, stdout=subprocess.PIPE)
        try:
            assert await asyncio.to_thread(listener.stdout.readline) == b"listening\n"
            with pytest.raises(errors.PeerLost, match="another user"):
                await shm.reached(f"{Path(where).name}/{socket_folder.SOCKET}", socket_folder.default_parent())
        finally:
            listener.kill()
            listener.wait()
            listener.stdout.close()
