"""C++ kernels for CPUs: one shared library of plain C functions for each tier of instructions.

A wheel from `make wheel` contains them. In a checkout the library of this machine is compiled ahead of time by `python
-m baton.engine.native`, or by the first engine that needs it. Without either the engine computes with torch, and
`unavailable()` says why.
"""

from baton.engine.native.build import NativeLibrary, library, unavailable

__all__ = ["NativeLibrary", "library", "unavailable"]
