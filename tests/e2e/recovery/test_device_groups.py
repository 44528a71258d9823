"""A stack whose workers have ranks with a GPU each, on stand-ins: prompts cross from ranks to ranks, and a lost rank
loses no token."""

import itertools
import os
import signal

import pytest
import torch

from baton.engine import native
from tests.e2e.conftest import GATEWAY_OPTIONS
from tests.support import bare_engine
from tests.support.client import Client, gather
from tests.support.process import children
from tests.support.stack import SLOW_STEPS, Stack
from tests.support.worker.device_ranks import FOLDER, OPTIONS

pytestmark = [
    pytest.mark.skipif(torch.cuda.is_available(), reason="real devices are another test's"),
    pytest.mark.skipif(native.library() is None, reason=native.unavailable() or "there"),
    pytest.mark.long,  # six processes that import torch
]
EOS = (0, 4)
RANKS = ("--tensor-parallel", "2")
FLAGS = tuple(f"--{name.replace('_', '-')}={value}" for name, value in OPTIONS.items())


class DeviceStack(Stack):
    launcher = ("-m", "tests.support.worker.device_ranks")


def test_streams_outlive_a_rank_of_two(run_stack, model, prompts, tmp_path):
    """First whole answers, by way of both groups; then a rank of the one that writes is killed in mid-stream, and a
    worker of one process goes on, with the prompts' KV from the ranks that have read them."""
    engine = bare_engine.load_engine(model, **OPTIONS)
    asked = [(prompts(90 + index), {"seed": index, "temperature": 0.9, "max_tokens": 40}) for index in range(3)]
    options = {"options": (*FLAGS, "--strict-numerics"), "env": {FOLDER: str(tmp_path)}, "fork_server": None}
    groups = {"prefill_options": RANKS, "decode_options": RANKS, "unlike_decode": [()]}
    with run_stack("groups", DeviceStack, gateway_options=GATEWAY_OPTIONS, **options, **groups) as stack:
        client, lost = Client(stack.target), stack.decode[0]
        replies = [client.generate(prompt_ids, **fields) for prompt_ids, fields in asked]
        assert all(reply.timing.transfer_s > 0 for reply in replies)
        with stack.armed(SLOW_STEPS):
            streams = [client.stream(prompt_ids, **fields) for prompt_ids, fields in asked * 2]
            begun = [list(itertools.islice(stream, 4)) for stream in streams]
            (rank,) = children(lost.pid)
            os.kill(rank, signal.SIGKILL)
            replies += [gather(itertools.chain(*both)) for both in zip(begun, streams, strict=True)]
        assert lost.wait() == 1 and "so this worker ends with all its ranks" in lost.text()
        lost.killed = True
        client.close()
    assert "num_attempts=2" in stack.gateways[0].text()
    for index, ((prompt_ids, fields), reply) in enumerate(zip(asked * 3, replies, strict=True)):
        whole = bare_engine.serve_alone(
            engine, [bare_engine.bare_request(str(index), prompt_ids, eos_ids=EOS, **fields)]
        )[str(index)]
        assert reply.token_ids == whole[0].token_ids
