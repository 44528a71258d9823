"""Products of torch whose bits do not depend on the number of rows, as far as that is up to its libraries."""

import os

# MKL: one order for any number of rows and threads (512 rows take as long as without it, a single one up to twice as
# long). oneDNN: all instructions but AMX, whose tiles are chosen by the number of rows.
_ORDER = {"MKL_CBWR": "AUTO,STRICT", "ONEDNN_MAX_CPU_ISA": "AVX512_CORE_FP16"}


def fix_order_of_sums() -> None:
    """Tell MKL and oneDNN to add in one order. Both read the environment at the first product of a process: call it
    before that. What the user has set stays."""
    for name, value in _ORDER.items():
        os.environ.setdefault(name, value)
