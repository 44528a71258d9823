"""Compile the attention and KV kernels for GPUs that are not here, down to their machine code, and print what came out
as JSON: per kernel, its matrix instructions, shared memory and warps. Run with
TRITON_INTERPRET=0."""

import json
import re
import sys

import triton
import triton.language as tl
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from baton.engine.attention import triton_paged
from baton.engine.kernels import kv_write, paged_attention, sampling
from baton.engine.parallel import add_ranks

POINTERS = {
    "fp32": "*fp32", "bf16": "*bf16", "fp16": "*fp16", "fp8_e4m3": "*fp8e4nv", "fp8_e5m2": "*fp8e5", "int8": "*i8",
    "int4": "*u8", "int32": "*i32", "int64": "*i64", "fp64": "*fp64",
}  # fmt: skip
CAPABILITIES = (80, 89, 90, 100, 120)  # 8.6 compiles as 8.9 does, but for e4m3
MULTIPLES = ("num_in", "num_out", "group", "segment_len")


def compiled(
    kernel, pointers: dict[str, str], constants: dict, capability: int, warps: int, fusion: bool = False,
    stages: int = 3,
):  # fmt: skip
    """`pointers`: kind by name; other arguments are fp32 or integers, strides and sizes of weights that 16 divides."""
    signature, attributes = {}, {}
    for index, name in enumerate(kernel.arg_names):
        floating = name in ("alpha", "limit") or name.endswith(("eps", "_scale", "_step"))
        scalar = "fp32" if floating else "i64" if name == "block_stride" else "i32"
        signature[name] = "constexpr" if name in constants else POINTERS[pointers[name]] if name in pointers else scalar
        if name in pointers or name.endswith("stride") or name in MULTIPLES:
            attributes[(index,)] = [["tt.divisibility", 16]]
    source = ASTSource(
        kernel, signature, constexprs={(kernel.arg_names.index(k),): v for k, v in constants.items()}, attrs=attributes
    )
    made = triton.compile(
        source,
        target=GPUTarget("cuda", capability, 32),
        options={"num_warps": warps, "enable_fp_fusion": fusion, "num_stages": stages},
    )
    found = set(re.findall(r"wgmma\.mma_async\S*|mma\.sync\S*|tcgen05\.mma\.\S*", made.asm["ptx"]))
    return {"products": sorted(found), "shared": made.metadata.shared, "bytes": len(made.asm["cubin"])}


def attend(
    form: str,
    capability: int,
    head_dim: int,
    tile: int,
    partial: bool,
    windowed: bool,
    fusion: bool = False,
    capped: bool = False,
    sinks: bool = False,
    shared: bool = False,
    stages: int = 3,
    dtype: str = "bf16",
):
    block_d = triton.next_power_of_2(head_dim)
    scaled = form in ("int8", "int4")
    pointers = dict.fromkeys(("q", "out"), dtype) | dict.fromkeys(("partials", "stats", "sinks"), "fp32")
    pointers |= dict.fromkeys(("k", "v"), form) | dict.fromkeys(("k_scales", "v_scales"), "fp16" if scaled else form)
    pointers |= dict.fromkeys(("tiles", "query_starts", "kv_lens", "block_table", "items", "owners"), "int32")
    constants = {
        "GROUP": 4, "HEAD_DIM": head_dim, "BLOCK_D": block_d, "BLOCK_M": tile,
        "BLOCK_N": triton_paged.BLOCK_N,
        "FORM": form if scaled else "cast", "WINDOWED": windowed, "CAPPED": capped, "SINKS": sinks, "PARTIAL": partial,
        "SHARED": shared,
        "MIN_SPLIT": 128,
    }  # fmt: skip
    warps = triton_paged.num_warps(tile, block_d, form)
    return compiled(paged_attention.attend, pointers, constants, capability, warps, fusion, stages)


def combine(capability: int):
    pointers = dict.fromkeys(("partials", "stats", "sinks"), "fp32")
    pointers |= dict.fromkeys(("tokens", "kv_lens", "items"), "int32")
    constants = {
        "GROUP": 4, "HEAD_DIM": 128, "BLOCK_D": 128, "BLOCK_M": 64, "BLOCK_N": triton_paged.BLOCK_N, "WINDOWED": False,
        "SINKS": False, "SHARED": False, "MIN_SPLIT": 128,
    }  # fmt: skip
    return compiled(paged_attention.combine, pointers | {"out": "bf16"}, constants, capability, 1)


def write(form: str, capability: int):
    scaled = form in ("int8", "int4")
    pointers = dict.fromkeys(("heads", "q", "q_weight", "k_weight"), "bf16") | dict.fromkeys(("cos", "sin"), "fp32")
    pointers |= dict.fromkeys(("positions", "slots"), "int64") | {"rows": form, "scales": "fp16" if scaled else form}
    constants = {
        "NUM_HEADS": 32, "NUM_KV_HEADS": 8, "HEAD_DIM": 128, "BLOCK": 64, "FORM": form if scaled else "cast",
        "LIMIT": {"fp8_e4m3": 448.0, "fp8_e5m2": 57344.0}.get(form, 0.0), "NORMED": True,
    }  # fmt: skip
    return compiled(kv_write._write, pointers, constants, capability, 1)


def draw(kernel, capability: int, warps: int, constants: dict):
    kinds = {"logits": "fp32", "given": "int32", "scores": "fp32", "ids": "int32", "best": "fp64", "best_ids": "int32",
             "token_ids": "int64"}  # fmt: skip
    pointers = {name: kind for name, kind in kinds.items() if name in kernel.arg_names}
    return compiled(kernel, pointers, constants, capability, warps)


def add(num_ranks: int, capability: int):
    pointers = {"parts": "fp32", "bias": "fp32", "out": "bf16"}
    constants = {"NUM_RANKS": num_ranks, "BLOCK": add_ranks.BLOCK}
    return compiled(add_ranks._add, pointers, constants, capability, 4)


def add_peers(num_ranks: int, capability: int):
    pointers = {"parts": "int64", "sums": "int64", "bias": "fp32"}
    constants = {"NUM_RANKS": num_ranks, "DTYPE": tl.bfloat16, "BLOCK": add_ranks.BLOCK}
    return compiled(add_ranks._add_peers, pointers, constants, capability, 4)


def main() -> None:
    made = {}
    for capability in CAPABILITIES:
        forms = [
            form for form in ("bf16", "fp8_e5m2", "int8", "int4", "fp8_e4m3") if capability >= 89 or form != "fp8_e4m3"
        ]
        for form in forms:
            made[f"{capability} write {form}"] = write(form, capability)
            for way in ("partial", "whole", "shared"):
                made[f"{capability} {form} {way}"] = attend(
                    form,
                    capability,
                    128,
                    64,
                    way == "partial",
                    form == "int8" and way != "shared",
                    shared=way == "shared",
                )
        made[f"{capability} score"] = draw(sampling.score, capability, 8, {"BLOCK": sampling.PART})
        constants = {"PARTS": 64, "BLOCK": sampling.ROW_BLOCK}
        made[f"{capability} choose"] = draw(sampling.choose, capability, sampling.ROW_WARPS, constants)
        for num_ranks in (2, 4, 8):
            made[f"{capability} add {num_ranks}"] = add(num_ranks, capability)
            made[f"{capability} add peers {num_ranks}"] = add_peers(num_ranks, capability)
        made[f"{capability} combine"] = combine(capability)
        for head_dim in (64, 96, 256):
            made[f"{capability} bf16 {head_dim}"] = attend("bf16", capability, head_dim, 64, False, True)
        made[f"{capability} capped"] = attend("bf16", capability, 256, 64, False, True, capped=True)
        stages = 1 if capability in (89, 120) else triton_paged.NUM_STAGES
        for form in forms:
            made[f"{capability} {form} latent"] = attend(form, capability, 576, 16, False, False, stages=stages)
        made[f"{capability} latent partial"] = attend("bf16", capability, 576, 16, True, False, stages=stages)
        for head_dim, tile in ((128, 64), (128, 128), (256, 32)):
            made[f"{capability} fp32 {head_dim} {tile}"] = attend(
                "fp32", capability, head_dim, tile, False, False, stages=stages, dtype="fp32"
            )
        made[f"{capability} sinks"] = attend("bf16", capability, 64, 64, False, True, sinks=True)
        made[f"{capability} fast few"] = attend("bf16", capability, 128, 16, True, False, fusion=True)
        made[f"{capability} fast chunk"] = attend("bf16", capability, 128, 128, False, False, fusion=True)
    json.dump(made, sys.stdout)


if __name__ == "__main__":
    main()
