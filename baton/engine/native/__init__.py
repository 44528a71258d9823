"""C++ kernels for CPUs, built on the machine they run on: one shared library with plain C functions.

`python -m baton.engine.native` builds it ahead of time; otherwise the first engine that wants it does. Where there is no
compiler everything goes on without it, and `reason()` says why.
"""

from baton.engine.native.build import NativeLibrary, library, reason

__all__ = ["NativeLibrary", "library", "reason"]
