"""Tokenize and Detokenize, and the prompts of Generate: bounded, counted and paid before any work is done."""

import asyncio
import json
import threading

import grpc
import pytest

from baton.v1 import inference_pb2 as pb
from gateway.text import constraint_checks, text_work
from gateway.text.text_threads import NUM_CHECKS, NUM_THREADS
from gateway.text.tokenizer import CannotEncode
from tests.gateway.calls import expect_refusal, generate, write_quotas
from tests.support.client import make_request
from tests.support.pace import patience


def tokenize(c, content, **fields):
    if isinstance(content, str):
        return c.stub.Tokenize(pb.TokenizeRequest(text=content), timeout=20, **fields)
    messages = pb.Messages(messages=[pb.Message(role="user", content=one) for one in content])
    return c.stub.Tokenize(pb.TokenizeRequest(messages=messages), timeout=20, **fields)


def detokenize(c, token_ids):
    return c.stub.Detokenize(pb.DetokenizeRequest(token_ids=token_ids), timeout=patience(20))


async def test_there_and_back(cluster):
    async with cluster() as c:
        for text in ("the fox", "Größe 東京 🙂 " * 20, "the fox " * 400, "<|user|>"):
            token_ids = (await tokenize(c, text)).token_ids
            assert (await detokenize(c, token_ids)).text == text
            asked = pb.DetokenizeRequest(token_ids=token_ids[:100], return_tokens=True)
            found = await c.stub.Detokenize(asked, timeout=patience(20))
            assert b"".join(each.text for each in found.tokens).decode(errors="ignore") in found.text
            assert len(found.tokens) == len(asked.token_ids)
        assert not (await detokenize(c, token_ids)).tokens
        assert (await detokenize(c, [])).text == ""
        assert (await detokenize(c, [0, 1, 4])).text == ""


SPELLS = "the <|user|> fox"
USER_ID = 1


async def prompt_ids(c, text: str) -> list[int]:
    request = make_request(text, max_tokens=1, echo=True)
    return list((await c.stub.Complete(request, timeout=20)).prompt.token_ids)


@pytest.mark.parametrize("is_allowed", [False, True])
async def test_a_prompt_spells_control_tokens_where_the_operator_allows_it(cluster, is_allowed):
    async with cluster(control_tokens_in_prompts=is_allowed) as c:
        ids = await prompt_ids(c, SPELLS)
        assert ids.count(USER_ID) == is_allowed and ids == (await tokenize(c, SPELLS)).token_ids
        assert (await detokenize(c, ids)).text == (SPELLS.replace("<|user|>", "") if is_allowed else SPELLS)


async def test_conversations_and_texts_that_are_no_prompts_never_spell_control_tokens(cluster):
    async with cluster(control_tokens_in_prompts=True) as c:
        assert list((await tokenize(c, [SPELLS])).token_ids).count(USER_ID) == 1, "the template's own"
        inputs = [pb.EmbedInput(text=SPELLS)]
        await c.stub.Embed(pb.EmbedRequest(inputs=inputs), timeout=20)
        (spec,) = [message.spec for kind, message in c.prefill[0].commands if kind == "prefill"]
        assert spec.token_ids and USER_ID not in spec.token_ids


async def test_a_text_that_cannot_fit_is_refused_at_once(cluster, monkeypatch):
    async with cluster() as c:
        work = c.pipeline.text
        monkeypatch.setattr(work._tokenizer, "encode_text", lambda *args: pytest.fail("it was tokenized"))
        monkeypatch.setattr(work._template, "render", lambda messages, options: pytest.fail("it was rendered"))
        for content, field in (("a" * 1_000_000, "text"), (["a" * 10_000] * 100, "messages")):
            error = await expect_refusal(tokenize(c, content))
            assert (error.code.name, error.fields) == ("INVALID_ARGUMENT", (field,))
            assert error.reason == "CONTEXT_LENGTH_EXCEEDED"
            assert "prompt is too long" in error.message and "maximum context length" in error.message


async def test_what_the_template_makes_too_long_is_not_tokenized(cluster, monkeypatch):
    async with cluster() as c:
        work = c.pipeline.text
        monkeypatch.setattr(work._template, "render", lambda messages, options: "a" * 1_000_000)
        monkeypatch.setattr(work._tokenizer, "encode_chat", lambda rendered: pytest.fail("it was tokenized"))
        error = await expect_refusal(tokenize(c, ["hello"]))
        assert (error.code.name, error.fields) == ("INVALID_ARGUMENT", ("messages",))


@pytest.mark.parametrize("limits, most", [("normal", 1024), ("strict", 128)])
async def test_messages_are_counted(cluster, limits, most):
    async with cluster(limits=limits) as c:
        assert (await tokenize(c, ["a"] * most)).token_ids
        for call in (tokenize(c, ["a"] * (most + 1)), generate(c, [("user", "a")] * (most + 1))):
            error = await expect_refusal(call)
            assert (error.code.name, error.fields) == ("INVALID_ARGUMENT", ("messages.messages",))
            assert f"at most {most}" in error.message


async def test_no_more_ids_than_the_context(cluster, monkeypatch):
    async with cluster() as c:
        assert (await detokenize(c, [300] * 1024)).text
        decoded = []
        monkeypatch.setattr(c.pipeline.text.detokenizer, "decode", decoded.append)
        error = await expect_refusal(detokenize(c, [300] * 1025))
        assert (error.code.name, error.fields) == ("INVALID_ARGUMENT", ("token_ids",)) and not decoded


async def test_tokens_are_paid(cluster, tmp_path):
    text = "[default]\ntokens_per_s = 0.001\nburst_tokens = 150\n"
    for call, num_before in ((lambda c: tokenize(c, "x" * 90), 2), (lambda c: detokenize(c, [300] * 80), 2)):
        async with cluster(quotas=write_quotas(tmp_path, text)) as c:
            for _ in range(num_before):
                await call(c)
            for other in (tokenize(c, "x"), detokenize(c, [300]), generate(c)):
                assert (await expect_refusal(other)).reason == "TENANT_TOKENS"


async def test_a_refused_text_is_not_paid(cluster, tmp_path):
    text = "[default]\ntokens_per_s = 0.001\nburst_tokens = 150\n"
    async with cluster(quotas=write_quotas(tmp_path, text)) as c:
        for _ in range(3):
            assert (await expect_refusal(tokenize(c, "a" * 1_000_000))).code.name == "INVALID_ARGUMENT"
        await tokenize(c, "x")


class Held:
    """Work on a long text, which waits until it is released."""

    def __init__(self, monkeypatch, c):
        self.go, self.began, self.num = threading.Event(), threading.Event(), 0
        tokenizer = c.pipeline.text._tokenizer
        encode = tokenizer.encode_text

        def held(text, *args):
            self.num += 1
            self.began.set()
            assert len(text) <= text_work._INLINE or self.go.wait(20)
            return encode(text, *args)

        monkeypatch.setattr(tokenizer, "encode_text", held)

    async def until_began(self):
        assert await asyncio.to_thread(self.began.wait, 10)


LONG = "the fox " * 300


async def test_calls_are_counted(cluster, tmp_path, monkeypatch):
    async with cluster(quotas=write_quotas(tmp_path, "[default]\nconcurrent_requests = 2\n")) as c:
        held = Held(monkeypatch, c)
        running = [asyncio.ensure_future(tokenize(c, LONG)) for _ in range(2)]
        await c.until(lambda: len(c.pipeline.admission.key_ids) == 2)
        for other in (tokenize(c, "x"), detokenize(c, [300]), generate(c)):
            assert (await expect_refusal(other)).reason == "TENANT_REQUESTS"
        held.go.set()
        await asyncio.gather(*running)
        assert not c.pipeline.admission.key_ids


async def test_who_hangs_up_has_no_work_done_and_pays_for_what_runs(cluster, tmp_path, monkeypatch):
    text = f"[default]\ntokens_per_s = 0.001\nburst_tokens = {NUM_THREADS * (len(LONG) + 10)}\n"
    async with cluster(quotas=write_quotas(tmp_path, text)) as c:
        held = Held(monkeypatch, c)
        calls = [asyncio.ensure_future(tokenize(c, LONG)) for _ in range(NUM_THREADS + 1)]
        await c.until(lambda: held.num == NUM_THREADS - 1)
        await c.until(lambda: len(c.pipeline.admission.key_ids) == NUM_THREADS + 1)
        for call in calls:
            call.cancel()
        await c.until(lambda: not c.pipeline.admission.key_ids)
        assert (await expect_refusal(tokenize(c, "x"))).reason == "TENANT_TOKENS"
        held.go.set()
        await c.until(lambda: not c.pipeline.text._threads._pending)
        assert held.num == NUM_THREADS - 1, "two were gone before their thread began"


async def test_a_constraint_that_is_checked_holds_up_no_chat(cluster, monkeypatch):
    async with cluster() as c:
        go, begun = threading.Event(), []

        def check(constraint, tenant):
            begun.append(constraint)
            assert go.wait(patience(20))
            return "", "is none"

        monkeypatch.setattr(c.pipeline.text._constraints, "check", check)
        asked = [make_request([5, 6], constraint=pb.Constraint(regex=f"a{{{n}}}")) for n in range(1, 9)]
        checked = [asyncio.ensure_future(c.stub.Complete(each, timeout=patience(20))) for each in asked]
        try:
            await c.until(lambda: len(begun) == NUM_CHECKS - 1)
            assert (await tokenize(c, ["the fox"])).token_ids
            assert len(begun) == NUM_CHECKS - 1, "the last thread for constraints is for others"
        finally:
            go.set()
        for error in await asyncio.gather(*checked, return_exceptions=True):
            assert "is none" in str(error)


async def test_a_process_for_constraints_begins_before_the_first_one(cluster, capable, monkeypatch):
    made = []

    class Counted(constraint_checks._Checker):
        def __init__(self):
            super().__init__()
            made.append(self)

    monkeypatch.setattr(constraint_checks, "_Checker", Counted)
    async with cluster() as c:
        await c.until(lambda: made and c.pipeline.text._starting.done())  # until then another thread takes a constraint
        await generate(c, [5, 6], constraint=pb.Constraint(regex="[a-z]+"))
        assert len(made) == 1


async def test_a_prompt_that_waits_for_its_thread_is_ended_by_its_deadline(cluster, monkeypatch):
    async with cluster(default_timeout_s=0.2) as c:
        held = Held(monkeypatch, c)
        for call in (c.stub.Tokenize(pb.TokenizeRequest(text=LONG)), c.stub.Complete(pb.GenerateRequest(text=LONG))):
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await call
            assert caught.value.code() is grpc.StatusCode.DEADLINE_EXCEEDED
        held.go.set()


async def test_short_texts_need_no_thread(cluster, monkeypatch):
    async with cluster() as c:
        held = Held(monkeypatch, c)
        blocked = asyncio.ensure_future(tokenize(c, LONG))
        await held.until_began()
        assert (await tokenize(c, "x" * 2048)).token_ids and await generate(c, "the fox")
        held.go.set()
        await blocked


async def test_a_token_that_the_model_does_not_have(cluster, folder):
    """Tokenizers come with tokens that were added and never trained."""
    content = json.loads((folder / "config.json").read_text())
    async with cluster() as c:
        c.pipeline.text._vocab_size = content["vocab_size"] - 130
        for call in (tokenize(c, "the fox"), generate(c, "the fox"), tokenize(c, ["the fox"])):
            error = await expect_refusal(call)
            assert error.code.name == "INVALID_ARGUMENT" and "the model has 270 ids" in error.message


async def test_what_the_tokenizer_gives_up_on(cluster, monkeypatch):
    def give_up(*args):
        raise CannotEncode("retry-limit")

    async with cluster() as c:
        for name in ("encode_text", "encode_chat"):
            monkeypatch.setattr(c.pipeline.text._tokenizer, name, give_up)
        for content, field in (("x", "text"), (["x"], "messages")):
            error = await expect_refusal(tokenize(c, content))
            assert (error.code.name, error.fields) == ("INVALID_ARGUMENT", (field,)) and "retry-limit" in error.message
