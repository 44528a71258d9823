"""Compile every kernel variant of the warm-up for compute capability 9.0, and write to sm90.json what each takes of a
multiprocessor, read from its machine code: registers, bytes of stack (where registers are spilled), shared memory, and
how many of its blocks (CTAs) fit at once. Variants whose source has not changed since keep their line.

    TRITON_INTERPRET=0 python -m tests.engine.kernels.kernel_resources [FILE]
"""

import json
import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from tests.engine.execute.meta_steps import Variant, warm_variants
from tests.engine.kernels.sources import TABLE, source_digests

REGISTERS, THREADS, CTAS = 65536, 2048, 32  # of a multiprocessor
SHARED_BYTES, RESERVED_BYTES = 233472, 1024  # of a multiprocessor; of it, taken by every block
CUOBJDUMP = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"


def resources(variant: Variant) -> dict[str, int]:
    source = ASTSource(variant.kernel, variant.signature, constexprs=variant.constants, attrs=variant.attributes)
    made = triton.compile(source, target=GPUTarget("cuda", 90, 32), options=variant.options)
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(made.asm["cubin"])
        file.flush()
        command = [CUOBJDUMP, "--dump-resource-usage", file.name]
        told = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    registers, stack = (int(re.search(rf"{name}:(\d+)", told)[1]) for name in ("REG", "STACK"))
    warps, shared = made.metadata.num_warps, made.metadata.shared
    return {
        "registers": registers, "stack": stack, "shared": shared, "warps": warps,
        "ctas": ctas_per_multiprocessor(registers, shared, warps),
    }  # fmt: skip


def ctas_per_multiprocessor(registers: int, shared: int, warps: int) -> int:
    """Registers are dealt out to warps eight a thread at a time."""
    threads = 32 * warps
    by_registers = REGISTERS // (-(-registers // 8) * 8 * threads)
    return min(by_registers, SHARED_BYTES // (shared + RESERVED_BYTES), THREADS // threads, CTAS)


def main(table: Path) -> None:
    digests = source_digests()
    old = json.loads(table.read_text()) if table.exists() else {"triton": "", "sources": {}, "kernels": {}}
    # All modules of kernels import from tiles.
    same = [
        name for name, digest in digests.items()
        if old["triton"] == triton.__version__
        and all(old["sources"].get(each) == digests[each] for each in (name, "tiles"))
    ]  # fmt: skip
    rows = {}
    variants = warm_variants()
    for name in sorted(variants):
        if name in old["kernels"] and name.partition(".")[0] in same:
            rows[name] = old["kernels"][name]
            continue
        rows[name] = resources(variants[name])
        print(name, rows[name], file=sys.stderr, flush=True)
    lines = ",\n".join(f"  {json.dumps(name)}: {json.dumps(row)}" for name, row in rows.items())
    head = f' "triton": {json.dumps(triton.__version__)},\n "sources": {json.dumps(digests)}'
    table.with_suffix(".new").write_text(f'{{\n{head},\n "kernels": {{\n{lines}\n }}\n}}\n')
    os.replace(table.with_suffix(".new"), table)


if __name__ == "__main__":
    main(Path(sys.argv[1]) if sys.argv[1:] else TABLE)
