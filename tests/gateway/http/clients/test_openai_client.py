"""OpenAI's own client, against what the gRPC door says of the same request."""

import asyncio
import json
import math
import re
import shutil
from urllib.error import HTTPError
from urllib.request import urlopen

import httpx2
import pytest
from openai import BadRequestError

from baton.v1 import inference_pb2 as pb
from gateway.http.openai.answers import ChatWriter, CompletionWriter
from gateway.http.openai.requests import read_completion
from gateway.http.wire.encoding import to_bytes_in_turns
from gateway.text.detokenizer import Detokenizer
from gateway.text.tokenizer import Tokenizer
from tests.gateway.calls import over_grpc
from tests.gateway.http.conftest import openai_client
from tests.gateway.http.loop_turns import turns
from tests.support.gateway.fake_worker import FakeWorker
from tests.support.gateway.small_tokenizers import byte_level, sentencepiece
from tests.support.pace import patience

MESSAGES = [{"role": "user", "content": "a quick brown fox"}]
PROMPT = list(range(20, 90))


async def test_models_are_listed_and_retrieved(served):
    async with served() as (_, client):
        (model,) = (await client.models.list()).data
        assert (model.id, model.owned_by) == ("fake", "baton") and model.model_dump()["max_model_len"] == 1024
        assert model.model_dump()["root"] == "fake"  # where `vllm bench serve` finds the name of a tokenizer
        assert (await client.models.retrieve("fake")).id == "fake"
        assert (await client.get("/models/", cast_to=object))["object"] == "list"


async def test_an_adapter_has_its_own_name_and_that_of_its_model(served, monkeypatch):
    make, named = FakeWorker.__init__, [{"name": "tabs", "identity": b"a" * 32}]
    monkeypatch.setattr(FakeWorker, "__init__", lambda self, *args, **hello: make(self, *args, adapters=named, **hello))
    async with served() as (_, client):
        listed = [(model.id, model.model_dump().get("parent")) for model in (await client.models.list()).data]
        assert listed == [("fake", None), ("tabs", "fake")]
        for name, parent in (*listed, ("fake:tabs", "fake")):
            model = await client.models.retrieve(name)
            assert (model.id, model.model_dump().get("parent")) == (name, parent)
            assert model.model_dump()["root"] == "fake"
            of = {"model": name}
            answers = [
                await client.chat.completions.create(messages=MESSAGES, max_completion_tokens=2, **of),
                await client.completions.create(prompt="a", max_tokens=2, **of),
                await client.responses.create(input="a", max_output_tokens=2, **of),
                await client.embeddings.create(input="a", encoding_format="float", **of),
            ]
            assert [each.model for each in answers] == [name] * 4
            ask = {"model": name, "max_tokens": 2, "messages": MESSAGES}
            assert (await client.post("/messages", body=ask, cast_to=dict))["model"] == name


async def test_chat_says_what_grpc_says(served):
    async with served() as (c, client):
        said = await over_grpc(c, [("user", "a quick brown fox")], max_tokens=9, seed=7, n=2, logprobs=2)
        asked = {"model": "fake", "messages": MESSAGES, "max_completion_tokens": 9, "seed": 7, "n": 2}
        whole = await client.chat.completions.create(
            **asked, logprobs=True, top_logprobs=2, extra_body={"return_token_ids": True}
        )
        assert [choice.message.content for choice in whole.choices] == [said.choices[n].text for n in range(2)]
        assert [choice.model_extra["token_ids"] for choice in whole.choices] == [
            said.choices[n].token_ids for n in range(2)
        ]
        assert {choice.finish_reason for choice in whole.choices} == {"length"}
        assert len(whole.choices[0].logprobs.content) == 9
        assert (whole.usage.prompt_tokens, whole.usage.completion_tokens) == (
            said.usage.prompt_tokens, said.usage.output_tokens,
        )  # fmt: skip
        texts, ends, usage = ["", ""], [], None
        options = {"include_usage": True}
        async for chunk in await client.chat.completions.create(**asked, stream=True, stream_options=options):
            usage = chunk.usage or usage
            for choice in chunk.choices:
                texts[choice.index] += choice.delta.content or ""
                ends += [choice.finish_reason] if choice.finish_reason else []
        assert texts == [said.choices[n].text for n in range(2)] and ends == ["length"] * 2
        assert usage.total_tokens == whole.usage.total_tokens


@pytest.mark.parametrize(
    "usage", [{}, {"stream_options": {"include_usage": True, "continuous_usage_stats": True}}], ids=["", "usage"]
)
async def test_token_ids_of_the_prompt_come_with_those_of_the_answer(served, usage):
    """As vLLM tells them, for training: of a chat beside the choices, of a completion in each."""
    async with served() as (_, client):
        ask = {"model": "fake", "seed": 7, "n": 2, "extra_body": {"return_token_ids": True, "ignore_eos": True}}
        chat = {**ask, "messages": MESSAGES, "max_completion_tokens": 3}
        body = {"model": "fake", "messages": MESSAGES}
        prompt_ids = (
            await client.post(f"{str(client.base_url).removesuffix('v1/')}tokenize", body=body, cast_to=object)
        )["tokens"]
        whole = await client.chat.completions.create(**chat)
        assert whole.model_extra["prompt_token_ids"] == prompt_ids
        assert [len(each.model_extra["token_ids"]) for each in whole.choices] == [3, 3]
        first, *rest = [chunk async for chunk in await client.chat.completions.create(**chat, stream=True, **usage)]
        assert first.model_extra["prompt_token_ids"] == prompt_ids
        assert not any("prompt_token_ids" in chunk.model_extra for chunk in rest)
        assert (
            "prompt_token_ids"
            not in (await client.chat.completions.create(model="fake", messages=MESSAGES)).model_extra
        )

        several = {**ask, "prompt": [PROMPT, PROMPT[:5]], "max_tokens": 3}
        for more, echoes in (({}, False), ({"echo": True, "logprobs": 0}, True)):
            whole = (await client.completions.create(**several, **more)).choices
            assert [each.model_extra["prompt_token_ids"] for each in whole] == [PROMPT] * 2 + [PROMPT[:5]] * 2
            assert (len(whole[2].logprobs.tokens) == 8) if echoes else whole[2].logprobs is None
            told, texts = {}, [""] * 4
            async for chunk in await client.completions.create(**several, **more, stream=True, **usage):
                for choice in chunk.choices:
                    texts[choice.index] += choice.text
                    if "prompt_token_ids" in choice.model_extra:
                        assert choice.index not in told
                        told[choice.index] = choice.model_extra["prompt_token_ids"]
            assert told == {n: each.model_extra["prompt_token_ids"] for n, each in enumerate(whole)}
            assert texts == [each.text for each in whole]


async def test_each_event_tells_the_usage_so_far(served):
    """As vLLM's continuous_usage_stats, by which load generators count tokens."""
    async with served() as (_, client):
        asked = dict(
            model="fake", prompt=["a fox", "a hen house"], max_tokens=5, seed=1, extra_body={"ignore_eos": True}
        )
        whole = (await client.completions.create(**asked)).usage
        options = {"include_usage": True, "continuous_usage_stats": True}
        *chunks, last = [
            chunk.usage async for chunk in await client.completions.create(**asked, stream=True, stream_options=options)
        ]
        counts = [usage.completion_tokens for usage in chunks]
        assert counts == sorted(counts) and len(set(counts)) > 2
        assert chunks[-1].total_tokens == last.total_tokens == whole.total_tokens


async def test_health_follows_readiness_and_needs_no_key(served):
    async with served() as (c, _):
        url = f"http://127.0.0.1:{c.gateway.http.port}/health"
        with await asyncio.to_thread(urlopen, url) as answer:
            assert answer.status == 200
        c.gateway.handler.is_draining = True
        with pytest.raises(HTTPError, match="503"):
            await asyncio.to_thread(urlopen, url)
        c.gateway.handler.is_draining = False


async def test_parts_and_developers_are_text_and_system(served):
    async with served() as (c, client):
        said = await over_grpc(c, [("system", "be brief"), ("user", "a fox")], max_tokens=4, seed=1)
        messages = [
            {"role": "developer", "content": "be brief"},
            {"role": "user", "content": [{"type": "text", "text": "a "}, {"type": "text", "text": "fox"}]},
        ]
        whole = await client.chat.completions.create(model="fake", messages=messages, max_tokens=4, seed=1)
        assert whole.choices[0].message.content == said.text


async def test_completions_of_every_form_of_a_prompt(served):
    async with served() as (c, client):
        said = await over_grpc(c, PROMPT, max_tokens=5, seed=3)
        ask = {"model": "fake", "max_tokens": 5, "seed": 3}
        whole = await client.completions.create(prompt=PROMPT, logprobs=1, **ask)
        assert whole.choices[0].text == said.text
        logprobs = whole.choices[0].logprobs
        assert len(logprobs.tokens) == len(logprobs.token_logprobs) == len(logprobs.text_offset) == 5
        several = await client.completions.create(prompt=["a fox", "a dog"], n=2, **ask)
        assert [choice.index for choice in several.choices] == [0, 1, 2, 3]
        for prompt, choices in (("a fox", several.choices[:2]), ("a dog", several.choices[2:])):
            one = await over_grpc(c, prompt, max_tokens=5, seed=3, n=2)
            assert [choice.text for choice in choices] == [one.choices[n].text for n in range(2)]
        texts = {0: "", 1: ""}
        async for chunk in await client.completions.create(prompt=[PROMPT, "a dog"], stream=True, **ask):
            for choice in chunk.choices:
                texts[choice.index] += choice.text
        assert texts == {0: said.text, 1: several.choices[2].text}


async def test_echo_and_the_logprobs_of_a_prompt(served):
    async with served() as (c, client):
        text = "a quick brown fox"
        prompt_ids = list((await c.stub.Tokenize(pb.TokenizeRequest(text=text), timeout=patience(20))).token_ids)
        ask = {"model": "fake", "prompt": [text, PROMPT], "max_tokens": 5, "seed": 3, "n": 2}
        plain = (await client.completions.create(**ask, logprobs=1)).choices
        whole = (await client.completions.create(**ask, echo=True, logprobs=1)).choices
        for before, choice in zip(plain, whole, strict=True):
            assert choice.text.endswith(before.text) and choice.text != before.text
            told, num_prompt = choice.logprobs, len(prompt_ids if choice.index < 2 else PROMPT)
            assert told.tokens[num_prompt:] == before.logprobs.tokens and len(told.tokens) == num_prompt + 5
            assert told.token_logprobs[0] is None and told.top_logprobs[0] is None and told.text_offset[0] == 0
            assert None not in told.token_logprobs[1:]
            assert len(choice.model_extra["prompt_logprobs"]) == num_prompt
        assert whole[0].text == text + plain[0].text
        (only,) = (await client.completions.create(**{**ask, "n": 1, "prompt": text}, echo=True)).choices
        assert only.text == text + plain[0].text and only.logprobs is None
        (only,) = (
            await client.completions.create(**{**ask, "n": 1, "prompt": text}, extra_body={"prompt_logprobs": 0})
        ).choices
        first, second = only.model_extra["prompt_logprobs"][:2]
        assert first is None and set(second) == {str(prompt_ids[1])} and second[str(prompt_ids[1])]["logprob"] == -1
        texts, tokens = [""] * 4, [0] * 4
        async for chunk in await client.completions.create(**ask, echo=True, logprobs=1, stream=True):
            for choice in chunk.choices:
                texts[choice.index] += choice.text
                tokens[choice.index] += len(choice.logprobs.tokens) if choice.logprobs else 0
        assert texts == [choice.text for choice in whole]
        assert tokens == [len(choice.logprobs.tokens) for choice in whole]


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
async def test_max_tokens_0_tells_of_the_prompt_alone(served, stream):
    """As evaluation harnesses ask for the log-likelihood of a text; it was refused."""
    async with served() as (_, client):
        ask = {"model": "fake", "prompt": [PROMPT, [20]], "echo": True, "logprobs": 1, "n": 2}
        whole = (await client.completions.create(**ask, max_tokens=1)).choices
        if stream:
            usage = {"stream_options": {"include_usage": True}}
            chunks = [each async for each in await client.completions.create(**ask, max_tokens=0, stream=True, **usage)]
            choices = sorted(
                (each for chunk in chunks for each in chunk.choices if each.logprobs), key=lambda c: c.index
            )
            ended = [each.finish_reason for chunk in chunks for each in chunk.choices if each.finish_reason]
            told = chunks[-1].usage
        else:
            answer = await client.completions.create(**ask, max_tokens=0)
            choices, told = answer.choices, answer.usage
            ended = [each.finish_reason for each in choices]
        assert ended == ["length"] * 4 and (told.prompt_tokens, told.completion_tokens) == (len(PROMPT) + 1, 0)
        for before, choice in zip(whole, choices, strict=True):
            assert choice.text == "".join(choice.logprobs.tokens)
            for name in ("tokens", "token_logprobs", "top_logprobs", "text_offset"):
                assert getattr(choice.logprobs, name) == getattr(before.logprobs, name)[:-1], name
        (bare,) = (await client.completions.create(model="fake", prompt="a", max_tokens=0)).choices
        assert (bare.text, bare.logprobs, bare.finish_reason) == ("", None, "length")


@pytest.mark.parametrize("new_writer", [ChatWriter, CompletionWriter])
async def test_others_run_while_logprobs_are_written(new_writer):
    """4,000 tokens with 20 alternatives each had taken 0.5 s of the event loop, in one piece."""
    tokens = Detokenizer(Tokenizer(byte_level()))
    top = [pb.TokenLogprob(token_id=20 + n, logprob=-n) for n in range(5)]
    logprobs = [pb.Logprobs(chosen=top[n % 5], top=top) for n in range(1000)]
    choices = [
        pb.Choice(index=index, text="x", logprobs=logprobs, finish_reason=pb.FINISH_REASON_STOP) for index in (0, 1)
    ]
    asked = read_completion({"prompt": "a", "n": 2, "logprobs": 5})
    writer = new_writer(asked, "fake", tokens)
    written, num_turns = await turns(to_bytes_in_turns(writer.whole([pb.CompleteResponse(choices=choices)])))
    assert num_turns > 2 * 1000 // 32 - 2
    found = [choice["logprobs"] for choice in json.loads(written)["choices"]]
    names = ("content",) if new_writer is ChatWriter else ("tokens", "token_logprobs", "top_logprobs", "text_offset")
    assert all(len(told[name]) == 1000 for told in found for name in names)


@pytest.mark.parametrize("new_writer", [ChatWriter, CompletionWriter])
async def test_logprobs_that_are_no_numbers_are_json(new_writer):
    """JSON.parse of JavaScript, and Go's reader, refuse NaN and Infinity."""
    top = [pb.TokenLogprob(token_id=20, logprob=logprob) for logprob in (math.nan, -math.inf)]
    logprobs = [pb.Logprobs(chosen=top[0], top=top)]
    choice = pb.Choice(text="x", logprobs=logprobs, finish_reason=pb.FINISH_REASON_STOP)
    writer = new_writer(read_completion({"prompt": "a", "logprobs": 5}), "fake", Detokenizer(Tokenizer(byte_level())))
    written = await to_bytes_in_turns(writer.whole([pb.CompleteResponse(choices=[choice])]))
    assert b"-9999" in written and not {b"NaN", b"Infinity"} & set(re.findall(rb"[A-Z][A-Za-z]+", written))


@pytest.mark.parametrize("new_writer", [ChatWriter, CompletionWriter])
async def test_others_run_while_logprobs_of_one_event_are_written(new_writer):
    """A slow reader has many tokens in one, and so has who lets a prompt be echoed."""
    tokens = Detokenizer(Tokenizer(byte_level()))
    logprobs = [pb.Logprobs(chosen=pb.TokenLogprob(token_id=20, logprob=-1.0))] * 1000
    writer = new_writer(read_completion({"prompt": "a", "echo": True, "logprobs": 0}), "fake", tokens)
    prompt = pb.EchoedPrompt(text="x", token_ids=[20] * 1001)
    message = pb.GenerateResponse(text="x", logprobs=logprobs, prompt=prompt, prompt_logprobs=logprobs)
    written, num_turns = await turns(writer.chunk(0, message))
    assert num_turns > 1000 // 32 - 2
    (choice,) = json.loads(written.removeprefix(b"data: "))["choices"]
    if new_writer is ChatWriter:
        assert len(choice["logprobs"]["content"]) == 1000
    else:
        assert (len(choice["logprobs"]["tokens"]), len(choice["prompt_logprobs"])) == (2001, 1001)


@pytest.mark.parametrize("echo", [False, True])
@pytest.mark.parametrize("tokenizer_json", [byte_level("<|begin_of_text|>"), sentencepiece("first")], ids=len)
def test_offsets_of_tokens_point_into_the_text(tokenizer_json, echo):
    tokenizer = Tokenizer(tokenizer_json)
    detokenizer, prompt = Detokenizer(tokenizer), "the 🙂! fox"
    prompt_ids, (_, *token_ids) = tokenizer.encode_text(prompt), tokenizer.encode_text("the 🦊, fox")

    def logprobs(ids) -> list[pb.Logprobs]:
        return [pb.Logprobs(chosen=pb.TokenLogprob(token_id=token_id, logprob=-1)) for token_id in ids]

    told = {"prompt": pb.EchoedPrompt(text=prompt, token_ids=prompt_ids), "prompt_logprobs": logprobs(prompt_ids[1:])}
    choice = pb.Choice(text=detokenizer.decoder(continues=True).push(token_ids), logprobs=logprobs(token_ids))
    response = pb.CompleteResponse(choices=[choice], **(told if echo else {}))
    writer = CompletionWriter(read_completion({"prompt": prompt, "echo": echo, "logprobs": 0}), "fake", detokenizer)
    (found,) = writer.whole([response])["choices"]
    offsets = dict(zip(found["logprobs"]["tokens"], found["logprobs"]["text_offset"], strict=True))
    for mark in "!," if echo else ",":
        assert offsets[mark] == found["text"].index(mark)


def test_the_likeliest_tokens_have_the_one_that_was_taken_beside_them():
    """One more than `logprobs`, where it is not among them, as in OpenAI's API."""
    tokens = Detokenizer(Tokenizer(byte_level()))
    best = [pb.TokenLogprob(token_id=20 + n, logprob=-n) for n in range(2)]
    rows = [pb.Logprobs(chosen=chosen, top=best) for chosen in (pb.TokenLogprob(token_id=30, logprob=-9), best[1])]
    choice = pb.Choice(text="x", logprobs=rows)
    writer = CompletionWriter(read_completion({"prompt": "a", "logprobs": 2}), "fake", tokens)
    (found,) = writer.whole([pb.CompleteResponse(choices=[choice])])["choices"]
    first, second, third = (tokens.shown(token_id)[0] for token_id in (20, 21, 30))
    assert list(found["logprobs"]["top_logprobs"]) == [{first: 0, second: -1, third: -9}, {first: 0, second: -1}]


async def test_rerank_has_the_scores_of_the_grpc_call(served, monkeypatch):
    monkeypatch.setattr("gateway.api.request_handler.LABELS", ("y", "n"))
    documents = ["a fox " * 20, "a dog", "a quick brown fox " * 9]
    async with served() as (c, client):
        said = await c.stub.Score(pb.ScoreRequest(query="which?", documents=documents), timeout=patience(20))
        best = sorted(range(3), key=lambda index: -said.scores[index])
        body = {"model": "fake", "query": "which?", "documents": documents}
        whole = await client.post("/rerank", body=body, cast_to=object)
        assert [each["index"] for each in whole["results"]] == best
        assert [each["relevance_score"] for each in whole["results"]] == [said.scores[index] for index in best]
        assert whole["results"][0]["document"] == {"text": documents[best[0]]}
        bare = client.with_options(base_url=str(client.base_url).removesuffix("v1/"))  # as LiteLLM asks vLLM
        assert (await bare.post("/rerank", body=body, cast_to=object))["results"] == whole["results"]
        body |= {"top_n": 1, "return_documents": False}
        (only,) = (await client.post("/rerank", body=body, cast_to=object))["results"]
        assert only["index"] == best[0] and "document" not in only
        cohere = client.with_options(base_url=str(client.base_url).replace("/v1/", "/v2/"))
        told = await cohere.post("/rerank", body={**body, "top_n": 2, "return_documents": True}, cast_to=object)
        assert told["results"] == [
            {"index": each["index"], "relevance_score": each["relevance_score"]} for each in whole["results"][:2]
        ]
        assert told["meta"] == {"api_version": {"version": "2"}, "tokens": {"input_tokens": said.usage.prompt_tokens}}
        with pytest.raises(BadRequestError) as caught:
            await client.post("/rerank", body={**body, "documents": ["a", ""]}, cast_to=object)
        assert caught.value.param == "documents[1]"


async def test_a_text_is_tokenized_with_or_without_what_the_tokenizer_puts_around_it(cluster, folder, tmp_path):
    """As vLLM has it, also to the programs that count and join texts by it."""
    shutil.copytree(folder, model := tmp_path / "fake")
    config = json.loads((model / "tokenizer_config.json").read_text())
    around = {"add_bos_token": True, "bos_token": "<|user|>", "add_eos_token": True, "eos_token": "<|end|>"}
    (model / "tokenizer_config.json").write_text(json.dumps({**config, **around}))
    async with cluster(model=model, http="127.0.0.1:0") as c, openai_client(c) as client:
        bare = client.with_options(base_url=str(client.base_url).removesuffix("v1/"))

        async def tokens(**body) -> list[int]:
            return (await bare.post("/tokenize", body={"model": "fake", **body}, cast_to=object))["tokens"]

        whole = await tokens(prompt="a fox", return_token_strs=False)
        assert whole == await tokens(prompt="a fox", add_special_tokens=True)
        plain = c.pipeline.text._tokenizer.encode_plain("a fox")
        assert len(whole) == len(plain) + 2 and whole[1:-1] == plain
        assert await tokens(prompt="a fox", add_special_tokens=False) == plain
        assert await tokens(messages=MESSAGES, add_special_tokens=False) == await tokens(messages=MESSAGES)
        for wrong, param in (
            ({"messages": MESSAGES, "add_special_tokens": True}, "add_special_tokens"),
            ({"prompt": "a", "add_special_tokens": "no"}, "add_special_tokens"),
            ({"prompt": "a", "return_token_strs": True}, "return_token_strs"),
        ):
            with pytest.raises(BadRequestError) as caught:
                await tokens(**wrong)
            assert caught.value.param == param


LONG = [{"role": "user", "content": "zyx" * 1000}]


async def test_what_is_too_long_has_the_code_and_the_words_that_clients_shorten_by(served):
    async with served() as (_, client):
        for call, param in (
            (client.chat.completions.create(model="fake", messages=LONG), "messages"),
            (client.chat.completions.create(model="fake", messages=MESSAGES, max_tokens=1020), "max_tokens"),
            (client.responses.create(model="fake", input=LONG), "input"),
            (client.embeddings.create(model="fake", input=["a", "zyx" * 1000]), "input[1].text"),
        ):
            with pytest.raises(BadRequestError) as caught:
                await call
            assert (caught.value.code, caught.value.param) == ("context_length_exceeded", param)
            assert "maximum context length" in caught.value.message


async def test_a_completion_has_16_tokens_unless_it_says(served):
    async with served() as (_, client):
        whole = await client.completions.create(model="fake", prompt=PROMPT)
        assert whole.usage.completion_tokens == 16


async def test_stop_strings_and_the_cache_are_told(served):
    async with served() as (c, client):
        said = await over_grpc(c, list(range(20, 320)), max_tokens=9)
        middle = said.text[3:5]
        await c.spread()
        whole = await client.completions.create(
            model="fake", prompt=list(range(20, 320)), max_tokens=9, stop=middle, seed=said.seed
        )
        assert whole.choices[0].text == said.text[: said.text.index(middle)]
        assert whole.choices[0].finish_reason == "stop"
        assert whole.choices[0].model_extra["stop_reason"] == middle
        assert whole.usage.prompt_tokens_details.cached_tokens == 256


@pytest.mark.parametrize("door", ["chat", "completion"])
async def test_a_token_that_was_named_to_stop_at_is_told(served, door):
    """As vLLM tells it; the end of a sequence is no reason to tell, and neither is a length."""
    async with served() as (_, client):
        ask = (
            {"prompt": PROMPT, "max_tokens": 9}
            if door == "completion"
            else {"messages": MESSAGES, "max_completion_tokens": 9}
        )
        create = client.completions.create if door == "completion" else client.chat.completions.create
        ask |= {"model": "fake", "seed": 7}

        async def ends(**more) -> list:
            body = {"return_token_ids": True, **more}
            (whole,) = (await create(**ask, extra_body=body)).choices
            chunks = [chunk async for chunk in await create(**ask, extra_body=body, stream=True)]
            last = next(chunk.choices[0] for chunk in reversed(chunks) if chunk.choices)
            assert (last.finish_reason, last.stop_reason) == (whole.finish_reason, whole.stop_reason)
            return [whole.finish_reason, whole.stop_reason, whole.token_ids]

        reason, stop, token_ids = await ends()
        assert (reason, stop) == ("length", None)
        assert await ends(stop_token_ids=[token_ids[3], 399]) == ["stop", token_ids[3], token_ids[:4]]
        assert (await ends(stop_token_ids=[token_ids[8]], min_tokens=9))[:2] == ["length", None]


async def test_the_first_token_does_not_wait_for_the_second(served):
    async with served() as (c, client):
        c.decode[0].hold("decode")
        stream = await client.completions.create(model="fake", prompt=PROMPT, max_tokens=4, stream=True)
        chunks = aiter(stream)
        first = await asyncio.wait_for(anext(chunks), 10)
        assert first.choices[0].finish_reason is None
        c.decode[0].release("decode")
        assert [chunk async for chunk in chunks][-1].choices[0].finish_reason == "length"


@pytest.mark.parametrize("streams", [False, True])
async def test_a_client_that_hangs_up_cancels_its_request(served, streams):
    async with served() as (c, client):
        c.decode[0].hold("decode")
        asking = asyncio.create_task(
            client.completions.create(model="fake", prompt=PROMPT, max_tokens=4, stream=streams)
        )
        await c.until(lambda: c.gateway.handler.num_running == 1)
        if streams:
            await (await asking).close()
        else:
            asking.cancel()
        await c.until(lambda: c.gateway.handler.num_running == 0)
        c.decode[0].release("decode")
        await c.idle()


async def test_requests_are_traced_and_counted_like_those_of_grpc(served, caplog):
    trace = "0af7651916cd43dd8448eb211c80319c"
    async with served() as (_, client):
        with caplog.at_level("INFO", "gateway.observe.access_log"):
            await client.completions.create(
                model="fake", prompt=PROMPT, max_tokens=2,
                extra_headers={"traceparent": f"00-{trace}-b7ad6b7169203331-01"}, extra_body={"request_id": "mine"},
            )  # fmt: skip
        (line,) = [record.getMessage() for record in caplog.records if "request ended" in record.getMessage()]
        assert f"trace_id={trace}" in line and "request_id=mine" in line and "outcome=ok" in line


@pytest.mark.parametrize("streams", [False, True])
async def test_the_id_by_which_the_log_has_a_request_is_where_clients_look_for_it(served, caplog, streams):
    caplog.set_level("INFO")
    ask = {"messages": [{"role": "user", "content": "a fox"}], "max_tokens": 3, "stream": streams}
    async with served() as (_, client), httpx2.AsyncClient(base_url=client.base_url) as raw:
        for path, body in (
            ("chat/completions", ask),
            ("messages", ask),
            ("responses", {"input": "a fox", "max_output_tokens": 3, "stream": streams}),
            ("completions", {"prompt": ["a", "b"], "stream": streams, "request_id": "mine"}),
        ):
            answer = await raw.post(path, json={**body, "model": "fake"})
            assert answer.headers["x-request-id"] == answer.headers["request-id"]
            assert f"request_id={answer.headers['x-request-id']} " in caplog.text, answer.text
            caplog.clear()
        # Nothing of a client's own goes into the head that is no id.
        answer = await raw.post("chat/completions", json={**ask, "model": "fake", "request_id": "a\r\nb: c"})
        assert answer.status_code == 400 and "b" not in answer.headers
        assert f"request_id={answer.headers['x-request-id']} " in caplog.text


@pytest.mark.parametrize("given", [{}, {"request_id": "mine"}])
async def test_an_answer_of_any_path_has_the_id_of_the_log_also_where_it_is_refused(served, caplog, given):
    caplog.set_level("INFO")
    ask = {"prompt": "a fox", "model": "fake"}
    async with served() as (_, client), httpx2.AsyncClient(base_url=client.base_url) as raw:
        for path, body, status in (
            ("completions", {**ask, "nonsense": 1}, 400),
            ("completions", {**ask, "temperature": -1}, 400),
            ("completions", {**ask, "model": "other"}, 404),
            ("chat/completions", {**ask, "messages": 3}, 400),
            ("embeddings", {"input": "a", "model": "fake"}, 200),
            ("embeddings", {"input": "a", "model": "other"}, 404),
            ("embeddings", {"input": ["a"] * 129, "model": "other"}, 404),
            ("rerank", {"query": "a", "documents": ["b"], "model": "fake"}, 400),
        ):
            answer = await raw.post(path, json=body | given)
            assert answer.status_code == status
            request_id = answer.headers["x-request-id"]
            assert request_id.startswith("mine") or not given
            assert f"request_id={request_id} " in caplog.text, answer.text
            caplog.clear()
