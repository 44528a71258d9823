"""Step 8: check a worker of two ranks on two GPUs, with the demo model: its sums in captured steps and through the
GPUs' memory, its tokens against those of one GPU, and its KV handed to a worker of one rank."""

import gc
from pathlib import Path
from typing import NamedTuple

import torch

from baton.cli.gpu.check import Say
from baton.cli.gpu.steps.workers import answer, stack
from baton.cli.launch.stack import SHIPPED_MODEL
from baton.engine.core.config import EngineConfig
from baton.engine.core.request import Key, PrefillDone, Request, RequestEnded, TokenRun
from baton.engine.engine import Engine
from baton.engine.parallel.distributed import DistributedCollectives
from baton.engine.parallel.sums import SumSpeed
from baton.sampling_params import SamplingParams

PROMPT_TOKENS, NUM_TOKENS = 100, 24


class Continuation(NamedTuple):
    """What an engine produced. `sums` and `why_no_peers` are those of several ranks; `why_no_peers` is "" if sums go
    through the GPUs' memory."""

    token_ids: list[int]
    num_graphs: int
    sums: SumSpeed | None = None
    why_no_peers: str = ""


def check(say: Say, model: Path | None) -> None:
    count = torch.cuda.device_count()
    if count < 2:
        say("two ranks", None, f"need two GPUs, and {count} can be seen")
    else:
        _sums(say)
        _give_back()
        _handoff(say)


def _sums(say: Say) -> None:
    try:
        found = found_with(SHIPPED_MODEL, 2)
    except ValueError as error:
        say("two ranks", False, str(error))
        return
    assert found.sums is not None
    row_us, sum_bytes_per_s, copy_bytes_per_s = found.sums
    say(
        "a sum",
        True,
        f"of one row takes {row_us:.0f} us, of a step {sum_bytes_per_s / 1e9:.1f} GB/s, a copy {copy_bytes_per_s / 1e9:.1f}",
    )
    say("captured sums", found.num_graphs > 0, f"{found.num_graphs} graphs")
    say(
        "sums in peers' memory",
        None if found.why_no_peers else True,
        found.why_no_peers or "with the bits of NCCL's way",
    )
    alone = found_with(SHIPPED_MODEL, 1).token_ids
    is_right = bool(alone) and found.token_ids == alone
    say("tokens of one GPU", is_right, f"{len(alone)} tokens" if is_right else f"{found.token_ids[:8]} and {alone[:8]}")


def found_with(folder: Path, degree: int) -> Continuation:
    """Load the model on `degree` GPUs and continue a prompt greedily. Raises ValueError if it cannot be loaded."""
    config = EngineConfig(folder, device="cuda", tensor_parallel=degree, max_num_seqs=4, max_num_batched_tokens=512)
    _give_back()
    engine = Engine.load(config)
    try:
        token_ids = _continued(engine)
        num_graphs = getattr(engine.runner.launcher, "num_graphs", 0)
        if engine.ranks is None:
            return Continuation(token_ids, num_graphs)
        collectives = engine.runner.model.collectives
        assert isinstance(collectives, DistributedCollectives)
        return Continuation(token_ids, num_graphs, engine.ranks.sums, collectives.why_no_peers)
    finally:
        if engine.ranks is not None:
            engine.ranks.close()


def _give_back() -> None:
    """Free the GPU memory of an engine: its pool takes nearly all of it, and so does that of the next one."""
    gc.collect()
    torch.cuda.empty_cache()


def _continued(engine: Engine) -> list[int]:
    ids = tuple(5 + index * index % (engine.spec.vocab_size - 5) for index in range(PROMPT_TOKENS))
    engine.submit(Request(Key("two ranks"), ids, len(ids), SamplingParams(), max_tokens=NUM_TOKENS))
    token_ids: list[int] = []
    while True:
        for output in engine.step():
            match output:
                case PrefillDone():
                    token_ids.append(output.first_tokens[0].token_id)
                case TokenRun():
                    token_ids.extend(output.token_ids)
                case RequestEnded():
                    return token_ids


def _handoff(say: Say) -> None:
    ranks = ("--prefill.tensor-parallel", "2")
    with stack("--prefill", "1", "--decode", "1", "--gateway.split", "always", *ranks) as (target, _):
        split = answer(target)
    with stack("--prefill", "0", "--decode", "1") as (target, _):
        whole = answer(target)
    is_right = bool(whole) and split == whole
    text = f"{len(whole)} characters" if is_right else f"{split[:60]!r} and {whole[:60]!r}"
    say("KV of two ranks to one", is_right, text)
