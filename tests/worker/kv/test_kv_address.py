"""The address of a worker's KV: --kv-socket-dir, --advertise-host, --transports."""

import pytest

from baton.service.settings import make_settings
from baton.worker.settings import WorkerSettings
from tests.support.models import make_model
from tests.support.worker.scripted import Session, make_spec, run_bounded, run_pair, run_worker


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return make_model(tmp_path_factory.mktemp("model") / "tiny")


NO_HOSTS = (
    "kv.example:5000",
    "0.0.0.0",
    "::",
    "",
    "a b",
    "http://kv",
    "-x",
    "[::1]",
    "fd77::4:50062",
    "fe80::1%eth0",
    "kv..example",
    f"{'a' * 64}.example",
)


@pytest.mark.parametrize("host", NO_HOSTS)
def test_hosts_that_nobody_can_reach(tmp_path, host):
    with pytest.raises(ValueError, match="--advertise-host .*: give a host name or an IP address, without") as raised:
        make_settings(WorkerSettings, {"model": tmp_path, "advertise_host": host})
    assert "\n" not in str(raised.value)


@pytest.mark.parametrize("host", ["kv.example", "10.0.0.7", "fd00::7", "node-1", "kv_1.a-b.example"])
def test_a_host_name_or_address_may_be_advertised(tmp_path, host):
    assert make_settings(WorkerSettings, {"model": tmp_path, "advertise_host": host}).advertise_host == host


def test_folder_that_is_not_there(tmp_path):
    with pytest.raises(ValueError, match="--kv-socket-dir .*: no such folder"):
        make_settings(WorkerSettings, {"model": tmp_path, "kv_socket_dir": tmp_path / "nowhere"})


def test_endpoints_carry_what_takers_can_reach(model, tmp_path):
    async def main():
        async with run_worker(model, "prefill", kv_socket_dir=tmp_path, advertise_host="fd00::7") as worker:
            session = await Session(f"127.0.0.1:{worker.port}").open()
            addresses = {endpoint.transport: endpoint.address for endpoint in session.hello.endpoints}
            assert addresses["tcp"].startswith("[fd00::7]:") and addresses["grpc"].startswith("[fd00::7]:")
            assert (tmp_path / addresses["shm"]).is_socket()
            await session.close()

    run_bounded(main)
    assert not list(tmp_path.iterdir())


def test_two_workers_that_share_no_folder_take_the_network(model, tmp_path):
    folders = [tmp_path / name for name in ("prefill", "decode")]
    for folder in folders:
        folder.mkdir()

    async def main():
        options = [{"kv_socket_dir": folder} for folder in folders]
        async with run_pair(model, *options) as (pair, _, _):
            answer = await pair.generate("one", make_spec(list(range(5, 205)), max_tokens=3))
            assert answer.fetched.transport == "tcp"
            await pair.prefill.wait_idle()
            await pair.decode.wait_idle()

    run_bounded(main)
