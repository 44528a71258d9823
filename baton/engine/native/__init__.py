"""C++ kernels for CPUs: one shared library with plain C functions for each tier of instructions.

A wheel made by `make wheel` carries them. From a checkout the one of this machine is compiled, ahead of time by `python
-m baton.engine.native`, otherwise by the first engine that wants it. Where neither can be had the engine computes on
torch, and `unavailable()` says why.
"""

from baton.engine.native.build import NativeLibrary, library, unavailable

__all__ = ["NativeLibrary", "library", "unavailable"]
