"""Compile the linear kernels, those of experts, those of adapters and those between products for GPUs that are not
here; prints JSON as compile_kernels.py does. Run with TRITON_INTERPRET=0."""

import json
import sys

from baton.engine.adapters import gpu_low_rank
from baton.engine.kernels import grouped, linear, low_rank, quantize, rows
from tests.engine.kernels.compile_kernels import CAPABILITIES, compiled

# kind -> dtype of the weight, and of x where it is not bf16
KINDS = {"dense": ("bf16", "bf16"), "fp32": ("fp32", "fp32"), "int8": ("int8", "bf16"), "fp8": ("fp8_e4m3", "bf16"),
         "e4m3": ("fp8_e4m3", "fp8_e4m3"), "int4": ("int4", "bf16"),
         "w8a8": ("int8", "int8")}  # fmt: skip

DENSE = ("dense", "fp32")


def form(kind: str, grouped: bool, offsets: bool) -> tuple[dict, dict]:
    """Pointers and constants that the kernels share; what a form has not is None."""
    stored, x = KINDS[kind]
    pointers = {"x": x, "w": stored, "y": "fp32" if kind == "fp32" else "bf16", "bias": "fp32"}
    given = {"scales": kind not in DENSE, "offsets": offsets, "x_scales": x not in ("bf16", "fp32")}
    pointers |= {name: "fp32" for name, is_given in given.items() if is_given}
    constants = {name: None for name, is_given in given.items() if not is_given}
    return pointers, constants | {
        "KIND": "fp8" if kind == "e4m3" else "dense" if kind in DENSE else kind, "GROUPED": grouped, "OFFSETS": offsets, "BIAS": True,
        "X_GROUPED": kind == "e4m3" and grouped,
    }  # fmt: skip


def only(kernel, pointers: dict, constants: dict) -> tuple[dict, dict]:
    """Those that a kernel has."""
    return tuple({k: v for k, v in each.items() if k in kernel.arg_names} for each in (pointers, constants))


def multiply(kind, capability, tile, partial, grouped=False, offsets=False, block_k=128, fusion=False, tree=False):
    pointers, constants = form(kind, grouped, offsets)
    columns = 128 if tile == 128 and kind not in ("int4", "fp32") and not tree else 64
    constants |= {"PARTIAL": partial, "TREE": tree, "BLOCK_M": tile, "BLOCK_N": columns, "BLOCK_K": block_k}
    pointers |= {"partials": "fp32"}
    return compiled(linear.multiply, pointers, constants, capability, 8 if tile > 64 else 4, fusion)


def multiply_grouped(kind, capability, tile, tree=False, each=False, block_k=128):
    """`each`: without tables of tiles."""
    pointers, constants = form(kind, False, False)
    columns = 128 if tile == 128 and kind not in ("int4", "fp32") and not tree else 64
    constants |= {"TREE": tree, "BLOCK_M": tile, "BLOCK_N": columns, "BLOCK_K": block_k}
    constants |= {"TOP_K": 0 if tree else 8, "SCATTERS": tree}
    if each:
        constants |= {"order": None, "tiles": None}
    else:
        pointers |= {"order": "int32", "tiles": "int32"}
    return compiled(grouped.multiply_grouped, pointers, constants, capability, 8 if tile > 64 else 4)


def made_of_experts(capability: int) -> dict:
    """What stands around the products of experts."""
    constants = {"NUM_OWNERS": 128, "BINS": 256, "TILE": 64, "BLOCK": 1024}
    pointers = {"owners": "int64", "order": "int32", "tiles": "int32"}
    made = {f"{capability} sort": compiled(grouped.sort, pointers, constants, capability, 4)}
    constants = {"NUM_CHOSEN": 8, "WEIGHTED": True, "BLOCK": 1024}
    pointers = {"outputs": "bf16", "weights": "fp32", "y": "fp32"}
    return made | {f"{capability} add_chosen": compiled(grouped.add_chosen, pointers, constants, capability, 4)}


def made_of_adapters(capability: int) -> dict:
    pointers = {"x": "bf16", "inner": "bf16", "y": "bf16", "tiles": "int64"}
    sizes = {name: getattr(gpu_low_rank, name) for name in ("BLOCK_M", "BLOCK_N", "BLOCK_K", "BLOCK_R")}
    return {
        f"{capability} {kernel.__name__}": compiled(kernel, *only(kernel, pointers, sizes), capability, 4)
        for kernel in (low_rank.shrink, low_rank.expand)
    }


def add_segments(kind, capability, tree=False):
    pointers, constants = form(kind, False, False)
    constants |= {"TREE": tree, "BLOCK_M": 16, "BLOCK_N": 64}
    kernel = linear.add_segments
    return compiled(kernel, *only(kernel, pointers | {"partials": "fp32"}, constants), capability, 4)


def multiply_row(kind, capability, grouped=False, offsets=False):
    pointers, constants = form(kind, grouped, offsets)
    constants |= {"BLOCK_N": 8, "BLOCK_K": 512, "PACK_K": 128}
    kernel = linear.multiply_row
    return compiled(kernel, *only(kernel, pointers, constants), capability, 4, True)


def made_between_products(capability: int) -> dict:
    """RMSNorm and SiLU x up, whose result stays as it is, or is rounded; and the rounding alone."""
    made = {}
    ways = {"bf16": (0, False), "int8": (0, False), "fp8_e4m3": (0, False), "fp8_e4m3 blocks": (128, False)}
    for name, (group, static) in ways.items():
        stored = name.split()[0]
        if stored == "fp8_e4m3" and capability < 89:
            continue
        none = {"scales": None} if stored == "bf16" else {}
        shared = none | {"GROUP": group, "STATIC": static}
        pointers = {"out": stored} | ({} if none else {"scales": "fp32"})
        inputs = dict.fromkeys(("x", "delta", "weight", "gate_up"), "bf16")
        between = {"CLAMPED": name == "bf16", "BLOCK": 1024}
        for kernel, constants in ((rows._add_norm, {"ADDS": True, "BLOCK": 4096}), (rows._swiglu, between)):
            kinds, given = only(kernel, pointers | inputs, shared | constants)
            made[f"{capability} {kernel.__name__} {name}"] = compiled(kernel, kinds, given, capability, 8)
        if not none:
            pointers = {"x": "bf16", "values": stored, "scales": "fp32"}
            constants = {"given": None, "GROUP": group, "STATIC": static, "BLOCK": 1024}
            made[f"{capability} round {name}"] = compiled(quantize._round_rows, pointers, constants, capability, 4)
    return made


def main() -> None:
    made = {}
    for capability in CAPABILITIES:
        for kind in KINDS:
            if kind in ("fp8", "e4m3") and capability < 89:
                continue
            block_k = 64 if kind in DENSE else 128
            for partial in (True, False):
                way = "partial" if partial else "whole"
                made[f"{capability} {kind} {way}"] = multiply(kind, capability, 64, partial, block_k=block_k)
            for tile, tree in ((64, False), (128, False), (64, True)):
                name = f"{capability} {kind} grouped{tile}{'tree' if tree else ''}"
                made[name] = multiply_grouped(kind, capability, tile, tree, block_k=block_k)
            made[f"{capability} {kind} each"] = multiply_grouped(kind, capability, 64, each=True, block_k=block_k)
            made[f"{capability} {kind} large"] = multiply(kind, capability, 128, False, block_k=block_k)
            for tile in (16, 128):
                name = f"{capability} {kind} tile{tile}"
                made[name] = multiply(kind, capability, tile, False, block_k=block_k, fusion=True)
            for tile in (64, 128):
                made[f"{capability} {kind} tree{tile}"] = multiply(
                    kind, capability, tile, False, block_k=block_k, tree=True
                )
            for tree in (False, True):
                made[f"{capability} {kind} {'leaves' if tree else 'segments'}"] = add_segments(kind, capability, tree)
            if kind != "w8a8":
                made[f"{capability} {kind} row"] = multiply_row(kind, capability)
        for kind in ("int4", "int8"):
            for group in (32, 128):
                name = f"{capability} {kind} g{group}-asym"
                made[name] = multiply(kind, capability, 64, True, True, True, group)
                made[f"{name} row"] = multiply_row(kind, capability, True, True)
        made |= made_between_products(capability) | made_of_experts(capability)
        made |= made_of_adapters(capability)
    json.dump(made, sys.stdout)


if __name__ == "__main__":
    main()
