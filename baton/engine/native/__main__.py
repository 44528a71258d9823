"""`python -m baton.engine.native`: build the library now. The exit code is 0 even without a library: the engine is then
slower, not wrong."""

import sys

from baton.engine import native

try:
    library = native.library()
except ValueError as error:  # of BATON_ISA
    sys.exit(f"native kernels: {error}")
print(f"native kernels: {library.path}" if library is not None else f"no native kernels: {native.unavailable()}")
