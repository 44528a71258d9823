"""Worlds of toy engines: wrong blocks are wrong tokens, and answers are computed without any engine."""

import random
from collections.abc import Sequence
from typing import Any

from baton.engine.core.request import Request, Speculation
from baton.engine.engine import Engine
from baton.engine.speculation.proposers.ngram import NgramProposer
from tests.support.engine.forced import ForcedProposer
from tests.support.engine.late_launcher import LateLauncher
from tests.support.engine.toy_engine import TOY_VOCAB, engine_request, toy_choices, toy_engine
from tests.support.fuzz.shrink import Plan
from tests.support.fuzz.two_engines import Answers


class Toy:
    """See Kind in two_engines.py."""

    vocab_size = TOY_VOCAB

    def requests(self, plan: Plan) -> list[Request]:
        return [request_of(plan, wish, self.vocab_size) for wish in plan["requests"]]

    def answers(self, plan: Plan, requests: Sequence[Request]) -> Answers:
        return {
            request.key.request_id: toy_choices(request, max_model_len=plan["max_model_len"]) for request in requests
        }

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
    """Return a request as the plan has it; prompts are drawn, begin alike, and some repeat themselves."""
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
