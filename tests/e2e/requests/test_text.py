"""The text that a client reads: Detokenize of the tokens, stops, limits, endings, usage."""

import pytest

from tests.support.client import Client

EOS = 0  # <|endoftext|>


def answer(client: Client, prompt_ids, **fields):
    fields = {"temperature": 1.0, "seed": 5, "max_tokens": 48, "ignore_eos": True, **fields}
    return client.generate(prompt_ids, **fields)


def _windows(text: str, size: int):
    """Substrings of the second half."""
    return (text[begin : begin + size] for begin in range(len(text) // 2, len(text) - size))


def test_pieces_join_to_the_text(client, prompts):
    for seed in range(6):
        reply = answer(client, prompts(20), seed=seed)
        assert reply.text == client.detokenize(reply.token_ids)
        assert reply.choices[0].finish_reason == "LENGTH"
        assert len(reply.token_ids) == reply.usage.output_tokens == 48


def test_half_a_character_is_held_back(client, prompts):
    """Only the lone bytes of é, 東 and 🙂 may be drawn, so that characters come in halves and never complete too."""
    byte_ids = [client.tokenize(character) for character in "é東🙂"]
    assert all(len(ids) > 1 for ids in byte_ids), "the tokenizer has these as one token: choose others"
    bias = {token_id: 100.0 for ids in byte_ids for token_id in ids}
    for seed in range(8):
        reply = answer(client, prompts(8), seed=seed, logit_bias=bias, max_tokens=40)
        assert reply.text == client.detokenize(reply.token_ids)


def test_a_stop_string_across_pieces(client, prompts):
    prompt_ids = prompts(30)
    free = answer(client, prompt_ids)
    stop = next(piece for piece in _windows(free.text, 6) if "\ufffd" not in piece)
    reply = answer(client, prompt_ids, stop=["never said", stop])
    assert reply.text == free.text[: free.text.index(stop)]
    assert reply.choices[0].finish_reason == "STOP" and reply.choices[0].matched_stop == stop
    assert free.text.startswith(reply.text)
    assert reply.token_ids == free.token_ids[: len(reply.token_ids)]
    assert stop in client.detokenize(reply.token_ids)


def test_half_a_stop_string_is_given_out_at_the_end(client, prompts):
    """Text held back as a possible begin of a stop string is sent when the choice ends without it."""
    prompt_ids = prompts(30)
    free = answer(client, prompt_ids)
    reply = answer(client, prompt_ids, stop=[free.text[-3:] + "\x00never"])
    assert reply.text == free.text and reply.choices[0].finish_reason == "LENGTH"


@pytest.mark.parametrize("n", [1, 3])
def test_stop_token_ids_are_in_the_tokens_and_not_in_the_text(client, prompts, n):
    prompt_ids = prompts(25)
    free = answer(client, prompt_ids, n=n)
    stop_id = free.choices[n - 1].token_ids[10]
    reply = answer(client, prompt_ids, n=n, stop_token_ids=[stop_id])
    for index, choice in reply.choices.items():
        whole = free.choices[index].token_ids
        cut = whole.index(stop_id) + 1 if stop_id in whole else len(whole)
        assert choice.token_ids == whole[:cut]
        stopped = stop_id in whole
        assert choice.finish_reason == ("STOP" if stopped else "LENGTH")
        assert choice.text == client.detokenize(choice.token_ids[:-1] if stopped else choice.token_ids)


def test_end_of_sequence(client, prompts):
    bias = {EOS: 100.0}
    ended = answer(client, prompts(10), logit_bias=bias, ignore_eos=False)
    assert ended.token_ids == [EOS] and ended.text == "" and ended.choices[0].finish_reason == "STOP"
    ignored = answer(client, prompts(10), logit_bias=bias, ignore_eos=True, max_tokens=5)
    assert ignored.token_ids == [EOS] * 5 and ignored.choices[0].finish_reason == "LENGTH"


def test_min_tokens_bans_the_end(client, prompts):
    reply = answer(client, prompts(10), logit_bias={EOS: 100.0}, ignore_eos=False, min_tokens=7)
    assert len(reply.token_ids) == 8 and reply.token_ids[-1] == EOS and EOS not in reply.token_ids[:-1]
    assert reply.choices[0].finish_reason == "STOP"


@pytest.mark.parametrize("max_tokens", [1, 2])
def test_few_tokens(client, prompts, max_tokens):
    """The first token may be the last: then nothing is left for the decode worker."""
    reply = answer(client, prompts(70), max_tokens=max_tokens, n=2)
    assert [len(choice.token_ids) for choice in reply.choices.values()] == [max_tokens] * 2
    assert reply.usage.output_tokens == 2 * max_tokens


def test_the_context_is_the_limit(client, prompts):
    """max_tokens unset: context - prompt."""
    near = client.generate(prompts(1000), temperature=0.0, ignore_eos=True)
    assert len(near.token_ids) == 24 and near.choices[0].finish_reason == "LENGTH"


def test_text_in_is_tokenized_like_tokenize(client):
    text = "Größe <|endoftext|> 東京 {x: 1}"
    token_ids = client.tokenize(text)
    assert EOS not in token_ids, "user text became a control token"
    assert client.detokenize(token_ids) == text
    by_text = client.generate(text, temperature=0.0, max_tokens=6)
    by_ids = client.generate(token_ids, temperature=0.0, max_tokens=6)
    assert by_text.outcome() == by_ids.outcome()


def test_messages_are_rendered_by_the_chat_template(client):
    """<|system|>...<|end|><|user|>...<|end|><|assistant|>, and no control token out of a message's content."""
    user, assistant, system, end = 1, 2, 3, 4
    messages = [("system", "Be brief."), ("user", "What is <|end|> in 東京?")]
    token_ids = client.tokenize(messages)
    assert [token_id for token_id in token_ids if token_id < 5] == [system, end, user, end, assistant]
    first_end = token_ids.index(end)
    assert client.detokenize(token_ids[1:first_end]) == messages[0][1]
    assert client.detokenize(token_ids[first_end + 2 : -2]) == messages[1][1]
    by_messages = client.generate(messages, temperature=0.0, max_tokens=6)
    assert by_messages.usage.prompt_tokens == len(token_ids)
    assert by_messages.outcome() == client.generate(token_ids, temperature=0.0, max_tokens=6).outcome()


def test_timing_adds_up(client, prompts):
    timing = client.generate(prompts(200), temperature=0.0, max_tokens=6, ignore_eos=True).timing
    phases = (timing.tokenize_s, timing.route_s, timing.admit_s, timing.prefill_queue_s, timing.prefill_s)
    assert min(*phases, timing.first_delivery_s) >= 0
    assert sum(phases) + timing.first_delivery_s == pytest.approx(timing.ttft_s, abs=1e-6)
    second = (timing.kv_wait_s, timing.decode_queue_s, timing.first_step_s, timing.second_delivery_s)
    assert min(second) >= 0 and timing.ttft_s + sum(second) <= timing.total_s + 1e-6
    assert 0 <= timing.transfer_hidden_s <= timing.transfer_s and timing.tpot_s > 0
