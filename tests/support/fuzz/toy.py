"""Worlds of toy engines: wrong blocks are wrong tokens, and answers are computed without any engine."""

import random
from collections.abc import Sequence
from typing import Any

from baton.engine.core.request import FinishReason, Request, Speculation
from baton.engine.engine import Engine
from baton.engine.sampling.penalties import changes
from baton.engine.sampling.sampler import Sampled, Sampler, sample_row
from baton.engine.speculation.proposers.ngram import NgramProposer
from tests.support.engine.forced import ForcedProposer
from tests.support.engine.late_launcher import LateLauncher
from tests.support.engine.toy_engine import TOY_VOCAB, engine_request, toy_engine, toy_logits
from tests.support.fuzz.shrink import Plan
from tests.support.fuzz.two_engines import Answers, Whole


class Toy:
    """See Kind in two_engines.py."""

    vocab_size = TOY_VOCAB

    def requests(self, plan: Plan) -> list[Request]:
        return [request_of(plan, wish, self.vocab_size) for wish in plan["requests"]]

    def answers(self, plan: Plan, requests: Sequence[Request]) -> Answers:
        return {request.key.request_id: _answer(request, plan["max_model_len"]) for request in requests}

    def engines(self, plan: Plan, answers: Answers) -> list[Engine]:
        return [self._engine(plan, options, answers) for options in plan["engines"]]

    def wires(self, plan: Plan, engines: Sequence[Engine]) -> None:
        """KV is carried in memory."""

    def _engine(self, plan: Plan, options: dict[str, Any], answers: Answers) -> Engine:
        options, is_late = {**options}, options["late"]
        del options["late"]
        proposers = _proposers(plan, options["max_num_seqs"], answers)
        if proposers:
            options["num_draft_tokens"] = plan["num_draft_tokens"]
            options["speculator"] = "ngram"
        engine = toy_engine(*proposers, max_model_len=plan["max_model_len"], **options)
        if is_late:
            engine.runner.launcher = LateLauncher(engine.runner.model, engine.pool)
        return engine


def _proposers(plan: Plan, max_num_seqs: int, answers: Answers) -> list:
    if plan["drafts"] == "ngram":
        return [NgramProposer(max_num_seqs, plan["max_model_len"])]
    if plan["drafts"] == "forced":
        known = {
            (name, choice): whole.token_ids for name, wholes in answers.items() for choice, whole in wholes.items()
        }
        return [ForcedProposer(known, 0.7, TOY_VOCAB)]
    return []


def request_of(plan: Plan, wish: Plan, vocab_size: int) -> Request:
    """As the plan has it; prompts are drawn, begin alike, and some repeat themselves."""
    shared = _drawn(f"{plan['seed']}/{wish['of']}", wish["shared"], vocab_size)
    own = _drawn(f"{plan['seed']}/{wish['id']}", wish["own"], vocab_size)
    if wish["loops"]:
        own = (own[:7] * len(own))[: len(own)]
    options = dict(wish["sampling"])
    if "logit_bias" in options:
        options["logit_bias"] = tuple(map(tuple, options["logit_bias"]))
    if "num_stops" in wish:
        stops = _drawn(f"{plan['seed']}/{wish['id']}/stops", wish["num_stops"], vocab_size)
        options |= {"stop_token_ids": frozenset(stops), "min_tokens": wish["min_tokens"]}
    if "num_drafts" in wish:
        options["speculation"] = Speculation(num_tokens=wish["num_drafts"])
    if "tenant" in wish:
        options["tenant_mark"] = wish["tenant"].encode()
    options |= {name: wish[name] for name in ("logprobs", "priority") if name in wish}
    seed = int(wish["id"][1:])
    return engine_request(
        wish["id"], shared + own, max(1, wish["max_tokens"]), n=max(1, wish["n"]), seed=seed, named=bool(wish["named"]),
        **options,
    )  # fmt: skip


def _drawn(name: str, count: int, vocab_size: int) -> list[int]:
    return random.Random(name).choices(range(vocab_size), k=count)


def _next(sampler: Sampler, request: Request, choice: int, token_ids: list[int]) -> Sampled:
    row, logits = sample_row(request, request.sampling, choice, token_ids), toy_logits(token_ids)
    params = row.params
    if not (params.temperature or params.logprobs is not None or changes(params, row.min_tokens_left_bans)):
        return Sampled(int(logits.argmax()), None)
    return sampler.sample(logits.unsqueeze(0), [row])[0]


def _answer(request: Request, max_model_len: int) -> dict[int, Whole]:
    """Return the expected answer of every choice."""
    sampler, wholes = Sampler(), {}
    for choice in range(request.sampling.n):
        token_ids, logprobs, reason = list(request.token_ids), [], None
        while reason is None:
            num_output = len(token_ids) - request.num_prompt_tokens + 1
            drawn = _next(sampler, request, choice, token_ids)
            token_ids.append(drawn.token_id)
            if drawn.logprobs is not None:
                logprobs.append(drawn.logprobs)
            if drawn.token_id in request.stop_token_ids and num_output > request.min_tokens:
                reason = FinishReason.STOP
            elif num_output >= request.max_tokens or len(token_ids) >= max_model_len:
                reason = FinishReason.LENGTH
        wholes[choice] = Whole(token_ids[len(request.token_ids) :], reason, logprobs)
    return wholes
