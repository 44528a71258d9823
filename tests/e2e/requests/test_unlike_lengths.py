"""Real workers that hold unlike lengths, by a flag and by a small pool: every answer is whole on every worker."""

import grpc
import pytest

from tests.support.client import Client, add_messages, read_error, read_some

ANSWER = {"max_tokens": 400, "temperature": 0.0, "ignore_eos": True}
THREADS = ("--threads", "1")
SMALL_POOL = ("--num-blocks", "8")  # of 32 tokens: 256 of the model's 1,024


@pytest.fixture
def client_of():
    clients = []

    def connect(stack) -> Client:
        clients.append(Client(stack.target))
        return clients[-1]

    yield connect
    for client in clients:
        client.close()


def test_one_request_has_one_answer_and_outlives_the_longer_worker(run_stack, client_of, prompts):
    prompt = prompts(100)
    options = {"num_prefill": 0, "options": THREADS, "unlike_decode": [SMALL_POOL], "num_decode": 2,
               "gateway_options": ("--max-start-wait-s", "0")}  # fmt: skip
    with run_stack("lengths", **options) as stack:
        small = stack.decode[2]
        assert small.ready()["context"] == "256" and stack.decode[0].ready()["context"] == "1024"
        assert "holds 256 of the model's 1024 tokens: its KV pool has 8 blocks; give more --num-blocks" in small.text()
        client = client_of(stack)
        answers = [client.generate(prompt, **ANSWER) for _ in range(24)]
        assert [answer.outcome() for answer in answers] == [answers[0].outcome()] * 24
        assert len(answers[0].token_ids) == 400 and answers[0].choices[0].finish_reason == "LENGTH"

        with stack.armed("engine.step=sleep:0.005"):
            for victim in stack.decode[:2]:
                call = client.stream(prompt, **ANSWER)
                reply = read_some(call, 300)
                if victim is stack.decode[1]:
                    victim.kill()
                    with pytest.raises(grpc.RpcError) as caught:
                        add_messages(reply, call)
                    said = read_error(caught.value)
                    assert said.code == grpc.StatusCode.UNAVAILABLE and said.reason == "DECODE_WORKER_LOST"
                else:
                    victim.kill()
                    reply = add_messages(reply, call)
                    assert reply.token_ids == answers[0].token_ids
        assert len(client.generate(prompt, **{**ANSWER, "max_tokens": 150}).token_ids) == 150


@pytest.mark.parametrize("split", ["always", pytest.param("auto", marks=pytest.mark.long)])
def test_prompts_about_as_long_as_the_prefill_worker(run_stack, client_of, prompts, split):
    options = {"options": THREADS, "prefill_options": ("--max-model-len", "640"), "gateway_options": ("--split", split)}
    with run_stack(f"prefill-{split}", **options) as stack:
        client = client_of(stack)
        for num_tokens in (638, 639, 640, 641):
            reply = client.generate(prompts(num_tokens), max_tokens=20, temperature=0.0, ignore_eos=True)
            assert len(reply.token_ids) == 20 and reply.choices[0].finish_reason == "LENGTH"
            assert (reply.timing.transfer_s > 0) == (split == "always" and num_tokens < 640)
