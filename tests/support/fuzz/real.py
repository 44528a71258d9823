"""Worlds of engines over the model of demo/: every stored form, both compute types, every speculator and transport."""

import functools
from collections.abc import Sequence
from dataclasses import replace
from itertools import count

from baton.engine.core.config import EngineConfig
from baton.engine.core.request import Key, Request
from baton.engine.engine import Engine
from kvtransfer.memory.region import Region
from tests.support.engine.collector import run_to_end
from tests.support.engine.toy_engine import WholeChoice
from tests.support.fuzz.shrink import Plan
from tests.support.fuzz.toy import request_of
from tests.support.fuzz.two_engines import Answers
from tests.support.fuzz.wires import Wires
from tests.support.process import ROOT

DEMO = ROOT / "demo"
VOCAB = 4096
_names = count()


class Real:
    """See Kind in two_engines.py. An answer is that of one engine without speculation, asked alone, out of any
    cache."""

    vocab_size = VOCAB

    def __init__(self) -> None:
        self._regions: list[Region] = []

    def requests(self, plan: Plan) -> list[Request]:
        return [request_of(plan, wish, VOCAB) for wish in plan["requests"]]

    def answers(self, plan: Plan, requests: Sequence[Request]) -> Answers:
        forms = plan["dtype"], plan["kv_dtype"], plan["quantization"]
        engine = _reference(*forms, plan["max_model_len"])
        return {request.key.request_id: _asked_alone(engine, request) for request in requests}

    def engines(self, plan: Plan, answers: Answers) -> list[Engine]:
        return [self._engine(plan, options) for options in plan["engines"]]

    def wires(self, plan: Plan, engines: Sequence[Engine]) -> Wires | None:
        """None: KV is carried in memory."""
        return None if plan["carrier"] == "memory" else Wires(engines, self._regions, plan["carrier"])

    def _engine(self, plan: Plan, options: Plan) -> Engine:
        options = {name: value for name, value in options.items() if name != "late"}
        if plan["drafts"]:
            options |= {"speculator": plan["drafts"], "num_draft_tokens": plan["num_draft_tokens"] or None}
        if plan["drafts"] in ("draft", "eagle", "medusa", "auto"):
            options["draft_model"] = DEMO / ("draft" if plan["drafts"] == "auto" else plan["drafts"])
        config = _config(plan["dtype"], plan["kv_dtype"], plan["quantization"], plan["max_model_len"], **options)
        return Engine.load(config, self._memory)

    def _memory(self, num_bytes: int) -> Region:
        self._regions.append(Region.create(num_bytes))
        return self._regions[-1]


def _config(dtype: str, kv_dtype: str, quantization: str, max_model_len: int, **options) -> EngineConfig:
    return EngineConfig(
        model=DEMO / "target", dtype=dtype, kv_dtype=kv_dtype, quantization=quantization, max_model_len=max_model_len,
        threads=1, **options,
    )  # fmt: skip


@functools.lru_cache(8)
def _reference(dtype: str, kv_dtype: str, quantization: str, max_model_len: int) -> Engine:
    options = dict(block_size=32, num_blocks=64, max_num_seqs=4, max_num_batched_tokens=512)
    return Engine.load(_config(dtype, kv_dtype, quantization, max_model_len, **options))


def _asked_alone(engine: Engine, request: Request) -> dict[int, WholeChoice]:
    alone = replace(request, key=Key(f"alone-{next(_names)}"), span_hashes=(), chain_parent=bytes(32))
    record = run_to_end(engine, [alone])[alone.key]
    return {
        choice: WholeChoice(token_ids, record.reasons[choice], record.logprobs[choice])
        for choice, token_ids in record.tokens.items()
    }
