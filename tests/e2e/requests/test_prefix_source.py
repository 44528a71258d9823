"""A prefill worker pulls what another worker has read, and answers as if it had read it itself."""

import sys
from contextlib import contextmanager

from tests.e2e.conftest import GATEWAY_OPTIONS
from tests.support.client import Client
from tests.support.process import Process

# Reading a prompt takes far longer than any delay of a busy machine could make pulling it look.
SLOW_READING = "engine.step=sleep:0.1"
NUM_TOKENS, NUM_PROMPTS = 640, 6  # all of them fit into a pool


def test_a_prefill_worker_pulls_what_it_has_not_read(run_stack, model, prompts, tmp_path):
    """Two gateways know a prefill worker each and share the decode worker, which so holds what one of them has not
    read. A holder that does not answer in time is not waited for, so on a busy machine some prompts are computed: not
    all."""

    @contextmanager
    def through(stack, prefill: str):
        workers = ["--prefill-workers", stack.address[prefill], "--decode-workers", stack.address["decode0"]]
        argv = [sys.executable, "-m", "gateway", "--model", str(model), "--listen", "127.0.0.1:0", *workers]
        process = Process(f"through-{prefill}", [*argv, *GATEWAY_OPTIONS], tmp_path, stack.env)
        client = Client(process.ready()["grpc"])
        try:
            yield client
        finally:
            client.close()
            process.stop(30)

    options = {"temperature": 0.8, "seed": 5, "max_tokens": 3}
    asked = [prompts(NUM_TOKENS) for _ in range(NUM_PROMPTS)]
    with run_stack("prefix", num_prefill=2) as stack, stack.armed(SLOW_READING):
        with through(stack, "prefill0") as client:
            cold = [client.generate(prompt_ids, **options) for prompt_ids in asked]
        with through(stack, "prefill1") as client:
            client.generate(prompts(200), **options)  # by its end the decode worker has reported its blocks
            again = []
            for prompt_ids in asked:
                again.append(client.generate(prompt_ids, **options))
                if again[-1].usage.cached_tokens:
                    break
    assert [reply.outcome() for reply in again] == [reply.outcome() for reply in cold[: len(again)]]
    assert {reply.usage.cached_tokens for reply in cold} == {0}
    assert again[-1].usage.cached_tokens == (NUM_TOKENS - 1) // 64 * 64
