"""Whole steps of 8B, 70B and Qwen shapes on meta tensors, in all forms of weights and KV (meta_steps.py)."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.engine.kernels.sources import read_table, source_digests

pytest.importorskip("triton")
PAGE = Path(__file__).parents[3] / "docs" / "gpu.md"


@pytest.fixture(scope="module")
def made() -> dict:
    command = [sys.executable, "-m", "tests.engine.execute.meta_steps"]
    environment = os.environ | {"TRITON_INTERPRET": "0"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-2000:]
    return json.loads(done.stdout)


@pytest.fixture(scope="module")
def found(made) -> dict:
    return made["models"]


def test_the_launches_of_a_step_are_those_that_the_page_tells(made):
    page, steps = PAGE.read_text(), made["steps"]
    assert f"| {steps['decode 1']}, {steps['decode 64']}, and {steps['draw']} a draw;" in page, steps
    assert f"| {steps['chunk 512']} in one graph |" in page and steps["draw"] <= 3, steps


def test_rounded_activations_cost_one_launch_a_layer(made):
    """That of what attention returns; norms and SiLU x up round what they store."""
    launches = made["rounding"]
    assert {form: count - launches["bf16"] for form, count in launches.items()} == {
        "bf16": 0, "fp8": 2, "fp8-block": 2, "int8": 2,
    }  # fmt: skip


def test_every_model_and_form_was_stepped(found):
    assert len(found) == 48 and all(each["launches"] > 100 for each in found.values())


def test_the_warm_up_covers_what_a_serving_trace_asks_for(found):
    """Whatever its lengths, alignments and numbers of sequences: else a kernel is compiled while requests wait."""
    cold = {name: each["cold"] for name, each in found.items() if each["cold"]}
    assert not cold, f"{sum(map(len, cold.values()))} variants: {next(iter(cold.items()))}"


def test_latent_attention_sinks_and_adapters_are_launched_and_warmed_as_well(made):
    found = made["torch"]
    assert len(found) == 6 and all(each["layers"] == "torch" and each["warm"] >= 8 for each in found.values()), found
    assert not {name: each["cold"] for name, each in found.items() if each["cold"]}


def test_layers_with_a_state_are_launched_and_warmed_as_well(made):
    """Three launches between the two products of a layer; of Mamba six, around two products more. Products of the fast
    form are cuBLAS's, and not counted."""
    found = made["states"]
    assert len(found) == 6 and not {name: each["cold"] for name, each in found.items() if each["cold"]}
    assert all(each["layers"] == "torch" and each["capturable"] for each in found.values())
    by_chunks = {name for name, each in found.items() if each["folded_by"] == "triton-chunks"}
    assert by_chunks == {"Mamba-2 False False", "gated delta net False False"}
    between = {name.removesuffix(" False False"): found[name]["launches"] for name in found if "False F" in name}
    assert between == {"Mamba-2": 3, "gated delta net": 3, "Mamba": 6}


AGAIN = "run TRITON_INTERPRET=0 python -m tests.engine.kernels.kernel_resources, and look at what has changed"


def test_the_table_of_kernels_has_every_variant_of_the_warm_up(found):
    """And nothing else, made of the sources as they are: so a change of what a kernel takes is seen in review."""
    table = read_table()
    assert source_digests() == table["sources"], AGAIN
    assert {name for each in found.values() for name in each["warm"]} == table["kernels"].keys(), AGAIN


def test_no_kernel_spills_registers():
    rows = read_table()["kernels"]
    assert len(rows) >= 200 and not {name: row["stack"] for name, row in rows.items() if row["stack"]}
