"""Prefill and decode workers that keep KV in other blocks, in another form, or in other numbers of ranks."""

import itertools
import os
import signal
import sys
from pathlib import Path

import pytest

from tests.e2e.conftest import GATEWAY_OPTIONS, OPTIONS
from tests.support import bare_engine
from tests.support.client import Client, gather
from tests.support.models import EOS_IDS
from tests.support.process import Process, children
from tests.support.stack import SLOW_STEPS

MAX_TOKENS = 10
BATON = str(Path(sys.executable).with_name("baton"))


def test_other_block_sizes_are_token_for_token_the_whole_run(run_stack, model, prompts):
    engine = bare_engine.load_engine(model, num_blocks=160, threads=1)
    options = {"prefill_options": ("--block-size", "32"), "decode_options": ("--block-size", "64")}
    with run_stack("blocks", gateway_options=GATEWAY_OPTIONS, **options) as stack:
        client = Client(stack.target)
        for index, num_tokens in enumerate((31, 150, 300)):
            prompt_ids, sampling = prompts(num_tokens), {"temperature": 0.9, "seed": index, "n": 2}
            request = bare_engine.bare_request(
                str(index), prompt_ids, max_tokens=MAX_TOKENS, eos_ids=EOS_IDS, **sampling
            )
            whole = bare_engine.serve_alone(engine, [request])[str(index)]
            reply = client.generate(prompt_ids, max_tokens=MAX_TOKENS, **sampling)
            assert reply.timing.transfer_s > 0
            for choice, wanted in whole.items():
                assert reply.choices[choice].token_ids == wanted.token_ids
        client.close()


@pytest.mark.parametrize(
    ("prefill", "decode"),
    [(2, 1), *(pytest.param(*pair, marks=pytest.mark.long) for pair in [(1, 2), (2, 2), (1, 4), (4, 1), (2, 4), (4, 2), (4, 4)])],
)  # fmt: skip
def test_other_numbers_of_ranks_are_token_for_token_the_whole_run(run_stack, model, prompts, prefill, decode):
    """Of one numerics class."""
    engine = bare_engine.load_engine(model, num_blocks=160, threads=1)
    options = {
        "options": (*OPTIONS, "--strict-numerics"),
        "prefill_options": ("--tensor-parallel", str(prefill)),
        "decode_options": ("--tensor-parallel", str(decode), "--block-size", "64"),
    }
    with run_stack(f"ranks{prefill}{decode}", gateway_options=GATEWAY_OPTIONS, **options) as stack:
        client = Client(stack.target)
        for index, num_tokens in enumerate((31, 300)):
            prompt_ids = prompts(num_tokens)
            request = bare_engine.bare_request(
                str(index), prompt_ids, max_tokens=MAX_TOKENS, eos_ids=EOS_IDS, seed=index, temperature=0.9, n=2
            )
            whole = bare_engine.serve_alone(engine, [request])[str(index)]
            reply = client.generate(prompt_ids, max_tokens=MAX_TOKENS, seed=index, temperature=0.9, n=2)
            assert reply.timing.transfer_s > 0
            for choice, wanted in whole.items():
                assert reply.choices[choice].token_ids == wanted.token_ids
        client.close()


@pytest.mark.long
@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGSTOP])
def test_streams_of_a_lost_rank_go_on_in_another_number_of_ranks(run_stack, model, prompts, how):
    """Two ranks lose one in mid stream: a worker of one process, of the same class, goes on with every token."""
    engine = bare_engine.load_engine(model, num_blocks=160, threads=1)
    workers = {"decode_options": ("--tensor-parallel", "2"), "unlike_decode": [()]}
    options = {"options": (*OPTIONS, "--strict-numerics"), **workers}
    asked = [(prompts(40 + index), {"seed": index, "temperature": 0.9, "max_tokens": 60}) for index in range(4)]
    with run_stack(f"lost{how}", gateway_options=GATEWAY_OPTIONS, **options) as stack:
        client, lost = Client(stack.target), stack.decode[0]
        with stack.armed(SLOW_STEPS):
            streams = [client.stream(prompt_ids, **fields) for prompt_ids, fields in asked]
            begun = [list(itertools.islice(stream, 5)) for stream in streams]
            (rank,) = children(lost.pid)
            os.kill(rank, how)
            replies = [gather(itertools.chain(*both)) for both in zip(begun, streams, strict=True)]
        assert lost.wait() == 1 and "so this worker ends with all its ranks" in lost.text()
        lost.killed = True
        client.close()
    assert "num_attempts=2" in stack.gateways[0].text()
    for index, ((prompt_ids, fields), reply) in enumerate(zip(asked, replies, strict=True)):
        whole = bare_engine.serve_alone(
            engine, [bare_engine.bare_request(str(index), prompt_ids, eos_ids=EOS_IDS, **fields)]
        )[str(index)]
        assert reply.token_ids == whole[0].token_ids


def test_up_with_unlike_roles_answers(model, prompts, tmp_path):
    """A bf16 prefill feeds an int8 decode."""
    argv = [BATON, "up", "--model", str(model), "--listen", "127.0.0.1:0", "--num-blocks", "160", "--threads", "1"]
    argv += ["--no-gateway.stand-in", "--gateway.split", "always"]
    argv += ["--prefill.block-size", "32", "--decode.block-size", "64"]
    process = Process("up", [*argv, "--decode.kv-dtype", "int8"], tmp_path, {"OMP_NUM_THREADS": "1"})
    try:
        client = Client(process.ready(90)["grpc"])
        reply = client.generate(prompts(200), max_tokens=MAX_TOKENS, temperature=0.0)
        assert 0 < len(reply.token_ids) <= MAX_TOKENS and reply.timing.transfer_s > 0
        client.close()
    finally:
        process.stop(30)
    assert "mixed" in process.text()
