"""`python -m baton.engine.native`: build the library now. Exit 0 in any case: without it the engine is slower, not wrong."""

from baton.engine import native

library = native.library()
print(f"native kernels: {library.path}" if library is not None else f"no native kernels: {native.reason()}")
