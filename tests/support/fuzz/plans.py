"""Plans for a world of two engines, drawn from a seed: what the engines are, what is asked of them, and what happens.

{"seed": 7, "kind": "toy", "max_model_len": 256, ...,
 "engines": [{"block_size": 16, ...}, {...}],
 "requests": [{"id": "r0", "shared": 130, "own": 20, "max_tokens": 9, "course": "split", "at": 1, ...}, ...],
 "ops": [["go", "r0"], ["step", 1, [[3, ["cancel", "r0"]]]], ["tick", 40], ...]}

`at` is the engine that answers; the other one gives it KV. The third part of a step is what another thread does in it:
an op in front of the fourth time that the loop takes the ledger's lock.
"""

import random

from tests.support.fuzz.shrink import Plan

COURSES = ("whole", "split", "split", "split", "pull", "prefix")
BLOCK_SIZES = (1, 2, 4, 8, 16, 32, 64, 128)
SAMPLINGS = (
    {},
    {},
    {"temperature": 1.0},
    {"temperature": 0.8, "top_k": 12},
    {"temperature": 1.1, "top_p": 0.8, "min_p": 0.02},
    {"repetition_penalty": 1.3, "frequency_penalty": 0.4},
    {"temperature": 0.7, "presence_penalty": 0.5, "repetition_penalty": 1.2},
    {"logit_bias": [[3, 1.5], [7, -2.0]]},
)
Weights = dict[str, float]
CALM: Weights = {"go": 60, "cancel": 4, "park": 6, "resume": 6, "move": 4, "lapse": 2, "tick": 6, "break": 0.3}
LATE: Weights = {"go": 60, "cancel": 2, "park": 4, "resume": 6, "move": 4, "lapse": 2, "tick": 20, "break": 0.3}
RACES: Weights = {"go": 20, "cancel": 40, "park": 5, "resume": 10, "move": 10, "lapse": 15}  # in steps of late worlds


def toy_plan(seed: int) -> Plan:
    """Return a plan of small engines whose pools hold little more than one request."""
    draw = random.Random(seed)
    max_model_len = draw.choice((96, 192, 256, 384))
    plan = {
        "seed": seed, "kind": "toy", "max_model_len": max_model_len,
        "drafts": draw.choice(("", "", "ngram", "forced")), "num_draft_tokens": draw.choice((1, 3, 8)),
        "engines": [_engine(draw, max_model_len) for _ in range(2)],
        "requests": [_request(draw, index, max_model_len) for index in range(draw.randint(6, 40))],
    }  # fmt: skip
    return plan | {"ops": _ops(draw, plan["requests"], draw.randint(4, 12))}


def real_plan(seed: int) -> Plan:
    """Return a plan of engines over the model of demo/: any stored form, any speculator, both compute types."""
    draw = random.Random(seed)
    max_model_len = 384
    plan = {
        "seed": seed, "kind": "real", "max_model_len": max_model_len,
        "dtype": draw.choice(("fp32", "bf16")),
        "kv_dtype": draw.choice(("fp32", "bf16", "fp16", "fp8", "int8", "int4")),
        "quantization": draw.choice(("none", "none", "int8", "int4-g64")),
        "drafts": draw.choice(("", "ngram", "suffix", "draft", "eagle", "medusa", "auto")),
        "num_draft_tokens": draw.choice((0, 1, 4)),
        "carrier": draw.choice(("memory", "memory", "inproc", "shm", "tcp")),
        "engines": [_engine(draw, max_model_len, BLOCK_SIZES[4:]) for _ in range(2)],
        "requests": [_request(draw, index, max_model_len) for index in range(draw.randint(4, 12))],
    }  # fmt: skip
    for engine in plan["engines"]:
        engine["late"] = 0
    return plan | {"ops": _ops(draw, plan["requests"], 6)}


def _engine(draw: random.Random, max_model_len: int, block_sizes=BLOCK_SIZES) -> Plan:
    block_size, max_num_seqs = draw.choice(block_sizes), draw.choice((1, 2, 4, 8))
    contexts = draw.choice((1, 1, 1.3, 2, 4) if block_size > 4 else (1, 1.3))
    return {
        "block_size": block_size,
        "num_blocks": max(-(-max_model_len // block_size), int(contexts * max_model_len / block_size)),
        "max_num_seqs": max_num_seqs,
        "max_num_batched_tokens": max_num_seqs + 64 + draw.choice((0, 4, 64, 200)),
        "late": int(draw.random() < 0.2),  # two steps in flight, as on a GPU
    }


def _request(draw: random.Random, index: int, max_model_len: int) -> Plan:
    shared = draw.choice((0, 0, 64, 128, 130, 150))
    own = draw.choice((1, 2, 30, 63, 64, 65, draw.randint(1, 100)))
    room = max_model_len - 2
    shared, own = (shared, min(own, room - shared)) if shared < room else (0, min(own, room))
    max_tokens = draw.choice((1, 2, 6, draw.randint(1, 24), draw.randint(1, 70)))
    found = {
        "id": f"r{index}", "shared": shared, "of": draw.randrange(2), "own": own, "loops": int(draw.random() < 0.3),
        "max_tokens": max_tokens, "n": draw.choice((1, 1, 1, 1, 2, 4)), "sampling": draw.choice(SAMPLINGS),
        "course": draw.choice(COURSES), "at": draw.randrange(2), "named": int(draw.random() < 0.9),
    }  # fmt: skip
    if draw.random() < 0.2:
        found["logprobs"] = draw.choice((0, 1, 5))
    if draw.random() < 0.3:
        found |= {"num_stops": draw.choice((1, 6)), "min_tokens": draw.choice((0, 0, 5))}
    if draw.random() < 0.2:
        found["priority"] = draw.choice((-1, 1, 2))
    if draw.random() < 0.5:
        found["tenant"] = draw.choice(("a", "a", "b", "c"))
    if draw.random() < 0.1:
        found["num_drafts"] = draw.choice((0, 2, 12))
    return found


def _ops(draw: random.Random, requests: list[Plan], per_request: int) -> list:
    """Draw `per_request` operations for each request; most are about requests that have lately come."""
    total, found = per_request * len(requests), []
    is_late = draw.random() < 0.3  # most have little time
    for wish in requests:
        if draw.random() < (0.7 if is_late else 0.1):
            wish["deadline_ms"] = draw.choice((1, 20, 200))
    weights = LATE if is_late else CALM
    for number in range(total):
        newest = number * len(requests) // total
        if draw.random() < 0.35:
            found.append(["step", draw.randrange(2), _between(draw, requests, newest, RACES if is_late else CALM)])
        else:
            found.append(_op(draw, _recent(draw, requests, newest), weights))
    return found


def _recent(draw: random.Random, requests: list[Plan], newest: int) -> str:
    return requests[max(0, newest - draw.choice((0, 0, 0, 1, 1, 2, 3, 5)))]["id"]


def _between(draw: random.Random, requests: list[Plan], newest: int, weights: Weights) -> list:
    """Draw what other threads do in a step: mostly nothing."""
    if draw.random() < 0.6:
        return []
    most = draw.choice((2, 4, 8, 30))
    names = [_recent(draw, requests, newest) for _ in range(draw.choice((1, 1, 2, 4)))]
    return [[draw.randrange(most), _op(draw, name, weights)] for name in names]


def _op(draw: random.Random, name: str, weights: Weights) -> list:
    match kind := draw.choices(tuple(weights), tuple(weights.values()))[0]:
        case "move":
            return ["move", name, draw.choice(COURSES), draw.randrange(2)]
        case "tick":
            return ["tick", draw.choice((1, 10, 100))]
        case "break":
            return ["break", draw.randrange(2)]
    return [kind, name]
