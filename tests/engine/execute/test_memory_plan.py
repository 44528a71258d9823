"""What workers of large models take of GPUs of several sizes, weights, pool, graphs and steps together
(meta_memory.py)."""

import json
import os
import subprocess
import sys
from functools import cache
from pathlib import Path

import pytest

from baton.engine.core.config import EngineConfig
from baton.engine.models.registry import read_spec
from baton.planning.devices import GPUS
from baton.planning.memory import plan_memory

pytest.importorskip("triton")
SHAPES = Path(__file__).resolve().parents[3] / "baton" / "planning" / "shapes"


@cache
def planned(*plans: str) -> dict[str, list]:
    """`plans`: model, form of weights and GB of the GPU."""
    command = [sys.executable, "-m", "tests.engine.execute.meta_memory", *plans]
    environment = os.environ | {"TRITON_INTERPRET": "0"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr[-2000:]
    return json.loads(done.stdout)


def check(found: dict[str, list]) -> set[str]:
    """Every worker keeps to its share, or is ended by one line with the numbers; returns those plans that work."""
    fitting = set()
    for name, workers in found.items():
        for worker in workers:
            if isinstance(worker, str):
                assert "GiB" in worker and "\n" not in worker, name
                assert worker.startswith(("the model's weights take", "out of GPU memory: ")), worker
                continue
            assert worker["weights"] + worker["pool"] < worker["most"] <= worker["share"], (name, worker)
            # Most of what is left of the share is KV: a step and its graphs are counted once.
            assert worker["share"] - worker["most"] < 2 << 30, (name, worker)
        if not any(isinstance(worker, str) for worker in workers):
            fitting.add(name)
            assert sum(worker["most"] for worker in workers) <= workers[0]["total"]
    return fitting


def check_estimates(found: dict[str, list]) -> None:
    """What `baton plan` takes for a step, graphs and CUDA is at least what a start keeps free of KV."""
    for name, workers in found.items():
        spec = read_spec(SHAPES / f"llama-3.1-{name.split()[0].lower()}")
        for worker in workers:
            if isinstance(worker, str):
                continue
            config = EngineConfig(
                spec.folder, dtype="bf16", kv_dtype="bf16", max_model_len=worker["context"],
                max_num_batched_tokens=worker["num_tokens"], max_num_seqs=worker["num_seqs"],
            )  # fmt: skip
            plan = plan_memory(spec, GPUS["B200"], config, "none")
            kept = worker["share"] - worker["weights"] - worker["pool"]
            assert kept <= plan.step_bytes + plan.process_bytes < 1.2 * kept, (name, worker)


def test_8b_fits_twice_on_48_gb_and_70b_not_on_24():
    found = planned("8B bf16 48", "70B int4 24")
    fits = {"8B bf16 on 48 GB: " + roles for roles in ("prefill", "decode", "prefill + decode")}
    assert check(found) == fits
    assert all("a smaller model is needed" in line for line in found["70B int4 on 24 GB: prefill + decode"])
    check_estimates(found)


@pytest.mark.long
def test_every_card():
    models, cards = ("8B bf16", "8B int4", "70B int4"), (24, 48, 80, 141)
    found = planned(*(f"{model} {card}" for model in models for card in cards))
    assert len(found) == 36
    refused = {
        "8B bf16 on 24 GB: prefill + decode",
        *(
            f"70B int4 on {card} GB: {roles}"
            for card in (24, 48)
            for roles in ("prefill", "decode", "prefill + decode")
        ),
        "70B int4 on 80 GB: prefill + decode",
    }
    assert found.keys() - check(found) == refused
    check_estimates(found)
