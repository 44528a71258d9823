"""The kernels compile for GPUs that are not here: Triton brings the assembler along."""

import json
import os
import re
import subprocess
import sys

import pytest

from tests.engine.kernels.sources import read_table
from tests.support.pace import patience

pytestmark = [pytest.mark.long, pytest.mark.timeout(1800)]

# Bytes that a block may have: A100, L40S, H100, B200, RTX PRO 6000. An A10's and a 3090's are an L40S's.
SHARED_MEMORY = {"80": 166912, "89": 101376, "90": 232448, "100": 232448, "120": 101376}


def compiled(module: str, cache) -> dict[str, dict]:
    """Run a module that compiles kernels, and check that each kernel is within the limits of a block."""
    pytest.importorskip("triton")
    environment = os.environ | {"TRITON_CACHE_DIR": str(cache), "TRITON_INTERPRET": "0"}
    command = [sys.executable, "-m", f"tests.engine.{module}"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=patience(1800))
    assert done.returncode == 0, done.stderr
    made = json.loads(done.stdout)
    for name, kernel in made.items():
        assert kernel["bytes"] and kernel["shared"] <= SHARED_MEMORY[name.split()[0]], name
    return made


def test_linear_kernels_compile_for_ampere_hopper_and_blackwell(tmp_path):
    made = compiled("kernels.compile_linear", tmp_path)
    for capability, kind in (name.split()[:2] for name in made if name.endswith(" whole")):
        # The two ways of the exact form add products in the same instructions.
        partial, whole = (made[f"{capability} {kind} {way}"]["products"] for way in ("partial", "whole"))
        assert partial == whole and (whole or kind == "fp32"), kind  # which no matrix unit multiplies
        assert made[f"{capability} {kind} grouped64"]["products"] == whole, kind
        # And the larger tile: as many inputs to an instruction, of other outputs.
        large = {re.sub(r"n\d+k", "nk", each) for each in made[f"{capability} {kind} large"]["products"]}
        assert large == {re.sub(r"n\d+k", "nk", each) for each in whole}, kind
        assert capability != "90" or all("wgmma" in product for product in whole)


def test_compiled_for_ampere_hopper_and_blackwell(tmp_path):
    made = compiled("kernels.compile_kernels", tmp_path)
    for form in ("bf16", "fp8_e4m3", "fp8_e5m2", "int8", "int4"):
        # The ways of the fixed form add products in the same instructions.
        ways = [made[f"90 {form} {way}"]["products"] for way in ("partial", "whole", "shared")]
        assert ways[0] == ways[1] == ways[2]
        assert all("wgmma" in product for product in made[f"90 {form} whole"]["products"])


def test_kernels_of_states_compile_for_ampere_hopper_and_blackwell(tmp_path):
    made = compiled("recurrent.compile_states", tmp_path)
    assert len(made) == len(SHARED_MEMORY) * 19
    assert all(kernel["products"] for name, kernel in made.items() if "scan" in name or "prepare" in name)


def test_the_table_of_resources_is_what_is_compiled(tmp_path):
    triton = pytest.importorskip("triton")
    table, made = read_table(), tmp_path / "made.json"
    if triton.__version__ != table["triton"]:
        pytest.skip(f"the table was made with Triton {table['triton']}")
    environment = os.environ | {"TRITON_CACHE_DIR": str(tmp_path), "TRITON_INTERPRET": "0"}
    command = [sys.executable, "-m", "tests.engine.kernels.kernel_resources", str(made)]
    subprocess.run(command, env=environment, check=True, capture_output=True, timeout=patience(1800))
    assert json.loads(made.read_text()) == table
