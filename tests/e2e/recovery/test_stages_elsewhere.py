"""A worker one of whose stages is a process of another host: KV comes from both, and goes to both."""

import socket
import sys

import pytest

from tests.e2e.conftest import GATEWAY_OPTIONS, OPTIONS
from tests.support import bare_engine
from tests.support.client import Client
from tests.support.process import Process

MAX_TOKENS = 10
EOS = (0, 4)


def free_address() -> str:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return f"127.0.0.1:{listener.getsockname()[1]}"


@pytest.fixture
def rank(model, tmp_path):
    """A process of another host, as it were, and the address at which its leader takes it in."""
    address = free_address()
    program = [sys.executable, "-m", "baton.cli", "rank", "--leader", address, "--model", str(model), "--threads", "1"]
    process = Process("rank", program, tmp_path)
    try:
        yield process, address
    finally:
        process.popen.kill()
        process.wait()


def stages(address: str) -> tuple[str, ...]:
    return "--pipeline-parallel", "2", "--remote-stages", "1", "--rank-listen", address


def check_answers(target: str, model, prompts) -> None:
    """Token for token what one engine says, for prompts whose KV moves."""
    engine, client = bare_engine.load_engine(model, num_blocks=160, threads=1), Client(target)
    for index, prompt_ids in enumerate(prompts):
        fields = {"seed": index, "temperature": 0.9, "n": 2, "max_tokens": MAX_TOKENS}
        whole = bare_engine.serve_alone(
            engine, [bare_engine.bare_request(str(index), prompt_ids, eos_ids=EOS, **fields)]
        )[str(index)]
        reply = client.generate(prompt_ids, **fields)
        assert reply.timing.transfer_s > 0
        for choice, wanted in whole.items():
            assert reply.choices[choice].token_ids == wanted.token_ids
    client.close()


def test_kv_of_two_hosts_is_token_for_token_the_whole_run(run_stack, model, prompts, rank):
    """Of one numerics class, in other blocks. Then the rank is lost, and with it the worker."""
    process, address = rank
    options = {
        "options": (*OPTIONS, "--strict-numerics"),
        "prefill_options": stages(address),
        "decode_options": ("--block-size", "64"),
    }
    with run_stack("elsewhere", gateway_options=GATEWAY_OPTIONS, **options) as stack:
        check_answers(stack.target, model, [prompts(31), prompts(300), prompts(300)])
        (lost,) = stack.prefill
        process.kill()
        assert lost.wait() == 1
        assert "has closed its connection, so this worker ends with all its ranks" in lost.text()
        lost.killed = True
    assert "num_attempts=2" not in stack.gateways[0].text()  # no taker came before the rank knew its ticket


def test_kv_goes_to_layers_of_another_host(run_stack, model, prompts, rank):
    """From a prefill worker of one process, in other blocks, and then from the cache of the decode worker."""
    _, address = rank
    options = {
        "options": (*OPTIONS, "--strict-numerics"),
        "prefill_options": ("--block-size", "32"),
        "decode_options": ("--block-size", "128", *stages(address)),
    }
    shared = prompts(300)
    with run_stack("towards", gateway_options=GATEWAY_OPTIONS, **options) as stack:
        check_answers(stack.target, model, [prompts(31), shared, [*shared, *prompts(40)]])
