"""`python -m baton.engine.native`: build the library now. Exit 0 also where there is none: without it the engine is
slower, not wrong."""

import sys

from baton.engine import native

try:
    library = native.library()
except ValueError as error:  # of BATON_ISA
    sys.exit(f"native kernels: {error}")
print(f"native kernels: {library.path}" if library is not None else f"no native kernels: {native.unavailable()}")
