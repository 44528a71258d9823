"""A worker one of whose stages is a process of another host: KV comes from both, and goes to both."""

import socket
import sys

from tests.e2e.conftest import GATEWAY_OPTIONS, OPTIONS
from tests.support import bare
from tests.support.client import Client
from tests.support.process import Process

MAX_TOKENS = 10
EOS = (0, 4)


def free_address() -> str:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return f"127.0.0.1:{listener.getsockname()[1]}"


def test_kv_of_two_hosts_is_token_for_token_the_whole_run(run_stack, model, prompts, tmp_path):
    """Of one numerics class, in other blocks. Then the rank is lost, and with it the worker."""
    engine, address = bare.load_engine(model, num_blocks=160, threads=1), free_address()
    program = [sys.executable, "-m", "baton.cli", "rank", "--leader", address, "--model", str(model), "--threads", "1"]
    rank = Process("rank", program, tmp_path)
    options = {
        "options": (*OPTIONS, "--strict-numerics"),
        "prefill_options": ("--pipeline-parallel", "2", "--remote-stages", "1", "--rank-listen", address),
        "decode_options": ("--block-size", "64"),
    }
    try:
        with run_stack("elsewhere", gateway_options=GATEWAY_OPTIONS, **options) as stack:
            client = Client(stack.target)
            for index, num_tokens in enumerate((31, 300, 300)):
                prompt_ids = prompts(num_tokens)
                fields = {"seed": index, "temperature": 0.9, "n": 2, "max_tokens": MAX_TOKENS}
                whole = bare.run(engine, [bare.make_request(str(index), prompt_ids, eos_ids=EOS, **fields)])[str(index)]
                reply = client.generate(prompt_ids, **fields)
                assert reply.timing.transfer_s > 0
                for choice, wanted in whole.items():
                    assert reply.choices[choice].token_ids == wanted.token_ids
            (lost,) = stack.prefill
            rank.kill()
            assert lost.wait() == 1
            assert "has closed its connection, so this worker ends with all its ranks" in lost.text()
            lost.killed = True
            client.close()
        assert "num_attempts=2" not in stack.gateways[0].text()  # no taker came before the rank knew its ticket
    finally:
        rank.popen.kill()
        rank.wait()


def test_kv_goes_to_layers_of_another_host(run_stack, model, prompts, tmp_path):
    """From a prefill worker of one process, in other blocks, and then from the cache of the decode worker."""
    engine, address = bare.load_engine(model, num_blocks=160, threads=1), free_address()
    program = [sys.executable, "-m", "baton.cli", "rank", "--leader", address, "--model", str(model), "--threads", "1"]
    rank = Process("rank", program, tmp_path)
    options = {
        "options": (*OPTIONS, "--strict-numerics"),
        "prefill_options": ("--block-size", "32"),
        "decode_options": (
            *("--block-size", "128", "--pipeline-parallel", "2", "--remote-stages", "1", "--rank-listen", address),
        ),
    }
    try:
        with run_stack("towards", gateway_options=GATEWAY_OPTIONS, **options) as stack:
            client, shared = Client(stack.target), prompts(300)
            for index, prompt_ids in enumerate((prompts(31), shared, [*shared, *prompts(40)])):
                fields = {"seed": index, "temperature": 0.9, "n": 2, "max_tokens": MAX_TOKENS}
                whole = bare.run(engine, [bare.make_request(str(index), prompt_ids, eos_ids=EOS, **fields)])[str(index)]
                reply = client.generate(prompt_ids, **fields)
                assert reply.timing.transfer_s > 0
                for choice, wanted in whole.items():
                    assert reply.choices[choice].token_ids == wanted.token_ids
            client.close()
    finally:
        rank.popen.kill()
        rank.wait()
