"""Compile the kernels of layers with a state for GPUs that are not here; prints JSON as compile_kernels.py does. Run
with TRITON_INTERPRET=0."""

import json
import sys

from baton.engine.kernels.state import chunks, finish, folds, inputs
from tests.engine.kernels.compile_kernels import CAPABILITIES, compiled

SEQUENCES = dict.fromkeys(("table", "query_starts", "kv_lens"), "int32")
STATES = SEQUENCES | {"states": "fp32", "y": "fp32", "inputs": "fp32"}
# Tiles of Mamba-2 with heads of 64 x 128, of gated delta net with heads of 128 x 128, of Jamba's 16 elements a channel.
FOLDS = {
    "mamba2": (folds.fold_mamba2, ("step_bias", "decay", "skip"), {"BLOCK_P": 32, "BLOCK_N": 128}, 4),
    "delta_net": (folds.fold_delta_net, ("step_bias", "decay"), {"BLOCK_K": 128, "BLOCK_V": 8}, 1),
    "mamba": (folds.fold_mamba, ("selected_b", "selected_c", "decay", "skip"), {"BLOCK_N": 16, "BLOCK_C": 64}, 1),
}

CHUNKS = (
    (chunks.scan_mamba2, {"BLOCK_P": 32, "BLOCK_N": 128}),
    (chunks.prepare_delta_net, {"BLOCK_K": 128}),
    (chunks.scan_delta_net, {"BLOCK_K": 128, "BLOCK_V": 32}),
)


def made_for(capability: int) -> dict:
    made = {}
    for extra in (0, 16):
        for name, (kernel, parameters, constants, warps) in FOLDS.items():
            pointers = STATES | dict.fromkeys(parameters, "fp32") | ({"steps": "bf16"} if name == "mamba" else {})
            pointers = {name: kind for name, kind in pointers.items() if name in kernel.arg_names}
            for chunk in (0, 64) if "CHUNK" in kernel.arg_names else (None,):
                given = constants | {"EXTRA": extra} | ({} if chunk is None else {"CHUNK": chunk})
                made[f"{capability} {name} {extra} {chunk}"] = compiled(kernel, pointers, given, capability, warps)
        for normed in (0, 32):
            pointers = SEQUENCES | {"rows": "bf16", "weight": "fp32", "states": "fp32", "out": "fp32"}
            pointers |= {"drafts": "fp32"} if extra else {}
            constants = {} if extra else {"drafts": None}
            constants |= {"TAPS": 4, "EXTRA": extra, "NUM_NORMED": normed, "NORM_SIZE": 128 if normed else 0}
            constants |= {"BLOCK_T": 8, "BLOCK": 128, "bias": None}
            made[f"{capability} convolve {extra} {normed}"] = compiled(
                inputs.convolve, pointers, constants, capability, 4
            )
    for kernel, constants in CHUNKS:
        pointers = STATES | dict.fromkeys(("step_bias", "decay", "skip", "solved"), "fp32")
        pointers = {name: kind for name, kind in pointers.items() if name in kernel.arg_names}
        given = constants | {"EXTRA": 0, "CHUNK": 64}
        way = (4, False, 3) if kernel is chunks.prepare_delta_net else (8, False, 1)
        made[f"{capability} {kernel.__name__}"] = compiled(kernel, pointers, given, capability, *way)
    pointers = {"y": "fp32", "rows": "bf16", "weight": "fp32", "out": "bf16"}
    for shared, block in ((True, 128), (False, 8192)):
        constants = {"NORMED": True, "NORM_FIRST": shared, "SHARED": shared, "BLOCK": block}
        made[f"{capability} finish {block}"] = compiled(
            finish.finish, pointers, constants, capability, 4 + 4 * (block > 128)
        )
    return made


def main() -> None:
    json.dump({name: each for capability in CAPABILITIES for name, each in made_for(capability).items()}, sys.stdout)


if __name__ == "__main__":
    main()
