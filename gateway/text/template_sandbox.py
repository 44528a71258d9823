"""Bound the work of a rendering in Jinja's sandbox, and the size of its values.

What one operator, call, filter or loop adds is counted; otherwise a template is trusted like the model that it comes
with.
"""

import re
from collections.abc import Iterable, Sized

from jinja2 import nodes, pass_context
from jinja2.compiler import CodeGenerator
from jinja2.exceptions import SecurityError
from jinja2.runtime import Context, Macro
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Namespace

MAX_CHARS = 4 << 20  # of a rendering, and of any value on its way; four times the largest request
MAX_WORK = 64 << 20  # characters written or copied; seconds at most
_STEP = 256  # what a call, a filter or one turn of a loop counts as
_MAX_NUMBER = 1_000_000  # as an argument: a width, an indentation
_MAX_BITS = 10_000  # of a whole number
_WIDE_PERCENT = re.compile(r"%[^a-zA-Z%]*(\*|\d{7})")
_WIDE_FORMAT = re.compile(r"\d{7}|:[^{}]*\{")
_OF_VALUES = ("default", "d")  # filters whose arguments are no widths or counts
_WORK = "work of this rendering"  # no template can write this name


class RenderBudget:
    """The work that a rendering may still do."""

    def __init__(self):
        self._left = MAX_WORK

    def spend(self, amount: int) -> None:
        """Count work. Raises SecurityError when it is too much."""
        self._left -= amount
        if self._left < 0:
            raise SecurityError("it takes more steps than a conversation can need")


class _CodeGenerator(CodeGenerator):
    def visit_Concat(self, node: nodes.Concat, frame) -> None:
        """Compile `a ~ b` to a call of the environment: the sandbox does not intercept it as an operator."""
        self.write("environment.concatenated(context, (")
        for part in node.nodes:
            self.visit(part, frame)
            self.write(", ")
        self.write("))")


class TemplateSandbox(ImmutableSandboxedEnvironment):
    """A sandbox whose renderings are bounded; each takes its variables from `variables(...)`."""

    code_generator_class = _CodeGenerator
    intercepted_binops = frozenset(("+", "*", "**", "%"))

    def __init__(self, **options):
        super().__init__(finalize=_written, **options)
        self.filters = {name: _bounded(name, function) for name, function in self.filters.items()}
        self.filters[_turns.__name__] = _turns

    @staticmethod
    def variables(**values) -> dict:
        """Return the variables of one rendering, with a budget that counts its work."""
        return {**values, _WORK: RenderBudget()}

    def add_filter(self, name: str, function) -> None:
        """Add a filter whose arguments and result are bounded."""
        self.filters[name] = _bounded(name, function)

    def _parse(self, source, name, filename) -> nodes.Template:
        template = super()._parse(source, name, filename)
        for loop in template.find_all(nodes.For):
            written = sum(len(data.data) for part in loop.body for data in part.find_all(nodes.TemplateData))
            arguments = [nodes.Const(written, lineno=loop.lineno)]
            loop.iter = nodes.Filter(loop.iter, _turns.__name__, arguments, [], None, None, lineno=loop.lineno)
        return template

    def call(__self, __context: Context, __obj, *args, **kwargs):
        """Call a function of a template, with bounded arguments and a bounded result."""
        if not _takes_values(__obj):
            _check_arguments((*args, *kwargs.values()))
        if getattr(__obj, "__name__", "") in ("format", "format_map"):
            _check_widths(_WIDE_FORMAT, _owner(getattr(__obj, "__wrapped__", None)))
        return _counted(__context, super().call(__context, __obj, *args, **kwargs))

    def call_binop(self, context: Context, operator: str, left, right):
        """Compute an operator of a template if the result is within bounds. Raises SecurityError."""
        if operator == "%":
            _check_widths(_WIDE_PERCENT, left)
        elif isinstance(left, int) and isinstance(right, int):
            bits = left.bit_length() * right if operator == "**" else left.bit_length() + right.bit_length()
            _check(bits, _MAX_BITS, "a number")
        elif operator == "*":
            sized, times = (left, right) if isinstance(left, Sized) else (right, left)
            if isinstance(sized, Sized) and isinstance(times, int):
                _check(len(sized) * times, MAX_CHARS, "a value")
        elif operator == "+" and isinstance(left, Sized) and isinstance(right, Sized):
            _check(len(left) + len(right), MAX_CHARS, "a value")
        return _counted(context, super().call_binop(context, operator, left, right))

    def concatenated(self, context: Context, parts: Iterable) -> str:
        """Return the parts of `a ~ b`, joined. Raises SecurityError if they are too long."""
        texts = [str(part) for part in parts]
        _check(sum(map(len, texts)), MAX_CHARS, "a value")
        return _counted(context, "".join(texts))


@pass_context
def _written(context: Context, value):
    """Count a value that a template writes, also into a variable, and return it."""
    context[_WORK].spend(len(value) if isinstance(value, str) else _STEP)
    return value


@pass_context
def _turns(context: Context, items, num_written: int):
    """Count the turns of a loop, each of which writes `num_written` characters of the template at most; return its
    items."""
    items = items if isinstance(items, Sized) else list(items)
    context[_WORK].spend(len(items) * (_STEP + num_written))
    return items


def _bounded(name: str, function):
    @pass_context
    def bounded(context: Context, *args, **kwargs):
        if name not in _OF_VALUES:
            _check_arguments((*args[1:], *kwargs.values()))
        if name == "format":
            _check_widths(_WIDE_PERCENT, args[0])
        return _counted(context, context.call(function, *args, **kwargs))

    return bounded


def _counted(context: Context, value):
    is_text = isinstance(value, str)
    if is_text:
        _check(len(value), MAX_CHARS, "a value")
    context[_WORK].spend(_STEP + (len(value) if is_text else 0))
    return value


def _check(size: int, most: int, what: str) -> None:
    if size > most:
        raise SecurityError(f"{what} in it grows beyond {most}")


def _takes_values(function) -> bool:
    """Return whether no argument is a width or a count. A macro takes any values: the calls within it are bounded."""
    return isinstance(function, Macro) or function in (dict, Namespace) or isinstance(_owner(function), dict)


def _owner(method):
    return getattr(method, "__self__", None)


def _check_arguments(arguments: Iterable) -> None:
    for value in arguments:
        if isinstance(value, int):
            _check(value, _MAX_NUMBER, "an argument")


def _check_widths(wide: re.Pattern, text) -> None:
    if isinstance(text, str) and wide.search(text):
        raise SecurityError("a width in it is too large, or is an argument")
