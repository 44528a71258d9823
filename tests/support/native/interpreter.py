"""Make Triton's interpreter (3.9) faster, by work that it repeats without need:

- At every launch it looks through all names of the language. (26 tests of attention and linear layers took 24.6 s of
  CPU, and without that 17.6.)
- At every call of a kernel's helper it patches the language again.
- It repeats every addition and multiplication of integers in 64 bits, for an assertion that only its debug mode makes.
- It builds a table of numpy's types for each type that it looks up. (Without these three, three tests of attention
  took 2.9 s instead of 4.2.)
"""

from collections.abc import Callable
from dataclasses import replace as replaced
from inspect import getmembers


def do_once(replace: Callable) -> None:
    """Let the interpreter do once what it repeats, by `replace(object, name, value)`. Import nothing of Triton before
    TRITON_INTERPRET is set."""
    from triton.runtime import interpreter

    builder = interpreter.interpreter_builder
    if not builder.options.debug:
        replace(builder, "options", replaced(builder.options, sanitize_overflow=False))
    _look_once(interpreter, replace)
    _patch_once(interpreter, replace)
    _find_types_once(interpreter, replace)


def _look_once(interpreter, replace: Callable) -> None:
    builtins: dict[object, list[tuple[str, object]]] = {}  # by module or class, as they are while no kernel runs

    def patch_builtin(owner, *given) -> None:
        if owner not in builtins:
            is_builtin = interpreter.tl.core.is_builtin
            builtins[owner] = [(name, member) for name, member in getmembers(owner) if is_builtin(member)]
        for name, member in builtins[owner]:
            if getattr(owner, name) is member:  # in a helper's call the interpreter's own is there
                interpreter._patch_attr(owner, name, member, *given)

    replace(interpreter, "_patch_builtin", patch_builtin)


def _patch_once(interpreter, replace: Callable) -> None:
    """Patch the language for the first function of a module that a launch runs; what helpers get of it is not read."""
    patch, patched = interpreter._patch_lang, set()

    def patch_lang(fn):
        if id(fn.__globals__) in patched:
            return None
        scope, is_launch = patch(fn), not patched
        patched.add(id(fn.__globals__))
        if is_launch:
            restore = scope.restore
            scope.restore = lambda: (patched.clear(), restore())
        return scope

    replace(interpreter, "_patch_lang", patch_lang)


def _find_types_once(interpreter, replace: Callable) -> None:
    find, found = interpreter._get_np_dtype, {}

    def numpy_type(dtype):
        name = dtype.scalar.name
        if name not in found:
            found[name] = find(dtype)
        return found[name]

    replace(interpreter, "_get_np_dtype", numpy_type)
