"""Workers that find their gateway, in real processes: started in any order, they serve."""

import socket
import sys
import time

import grpc
import pytest

from tests.support.client import Client
from tests.support.pace import patience
from tests.support.process import Process


@pytest.fixture
def gateway_address() -> str:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return f"127.0.0.1:{listener.getsockname()[1]}"


def test_workers_register_before_and_after_their_gateway_starts(model, fork_server, tmp_path, gateway_address, prompts):
    def start(name: str, module: str, *options: str) -> Process:
        argv = [sys.executable, "-m", module, "--model", str(model), *options]
        make = Process if module == "gateway" else fork_server.process
        return make(name, argv, tmp_path, {"OMP_NUM_THREADS": "1"})

    worker = ("--listen", "127.0.0.1:0", "--num-blocks", "160", "--threads", "1", "--gateways", gateway_address)
    processes = [start("prefill", "prefill_worker", *worker)]
    try:
        served = processes[0].ready()["model"]  # what an operator copies from the line that a worker prints
        allowed = ("--model-identity", served)
        processes.append(start("gateway", "gateway", "--listen", gateway_address, "--split", "always", *allowed))
        processes.append(start("decode", "decode_worker", *worker))
        processes[1].ready()
        client = Client(gateway_address)
        assert _answered(client, prompts(200)).usage.output_tokens == 5
        client.close()
        for process in processes[::-1]:
            assert process.stop() == 0, process.text()
        assert "not registered" in processes[0].text() and "Traceback" not in "".join(p.text() for p in processes)
    finally:
        for process in processes:
            process.kill()


def _answered(client: Client, prompt_ids: list[int]):
    """A worker that has just started on a busy machine may fall silent for a moment: the answer is to try again."""
    deadline = time.monotonic() + patience(30)
    while True:
        try:
            return client.generate(prompt_ids, temperature=0.0, max_tokens=5, ignore_eos=True)
        except grpc.RpcError as error:
            if error.code() is not grpc.StatusCode.UNAVAILABLE or time.monotonic() > deadline:
                raise
        time.sleep(0.1)
