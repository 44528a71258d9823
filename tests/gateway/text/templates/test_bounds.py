"""Templates that would fill memory or never end: one line, in bounded time and memory; and none that is in use."""

import time
import tracemalloc

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gateway.text.origins import render_origins
from gateway.text.template_sandbox import MAX_CHARS
from gateway.text.templates import ChatMessage, ChatOptions, ChatTemplate, TemplateFailed
from gateway.text.tokenizer import Tokenizer
from tests.gateway.text.templates.published import TEMPLATES, chat_template
from tests.support.gateway.small_tokenizers import byte_level

CONTROLS = Tokenizer(byte_level()).controls

LARGE = {
    "times": "{{ 'a' * 3000000000 }}",
    "times, the other way": "{{ 3000000000 * 'a' }}",
    "a list times": "{% set x = [0] * 3000000000 %}",
    "a power": "{{ 10 ** (10 ** 8) }}",
    "powers of numbers": "{% set n = namespace(x=10) %}{% for i in range(60) %}{% set n.x = n.x * n.x %}{% endfor %}",
    "percent": "{{ '%999999999d' % 1 }}",
    "percent star": "{{ '%*d' % (999999999, 1) }}",
    "format": "{{ '{:999999999}'.format(1) }}",
    "format of a format": "{{ '{:{w}}'.format(1, w=999999999) }}",
    "format of a format in words": "{{ '{:{w}}'.format(1, w='999999999') }}",
    "the filter format": "{{ '%999999999d' | format(1) }}",
    "center": "{{ 'a' | center(999999999) }}",
    "the method center": "{{ 'a'.center(999999999) }}",
    "ljust by name": "{{ 'a'.ljust(width=999999999) }}{{ 'a'.ljust(999999999) }}",
    "zfill": "{{ 'a'.zfill(999999999) }}",
    "expandtabs": "{{ '\\t'.expandtabs(999999999) }}",
    "indent": "{{ 'a\\nb' | indent(999999999) }}",
    "tojson": "{{ messages | tojson(indent=999999999) }}",
    "doubling": "{% set n = namespace(x='ab') %}{% for i in range(99) %}{% set n.x = n.x + n.x %}{% endfor %}",
    "doubling with ~": "{% set n = namespace(x='ab') %}{% for i in range(99) %}{% set n.x = n.x ~ n.x %}{% endfor %}",
    "doubling, written out": "{% set x = 'ab' %}" + "{% set x = x ~ x %}" * 60 + "{{ x }}",
    "doubling by join": "{% set n = namespace(x='ab') %}{% for i in range(99) %}{% set n.x = [n.x, n.x]|join %}{% endfor %}",
    "doubling by replace": "{% set n = namespace(x='ab') %}{% for i in range(99) %}"
    "{% set n.x = n.x.replace('a', 'aa') %}{% endfor %}",
}  # fmt: skip
LONG_RUNNING = {
    "a wide range": "{% for i in range(10 ** 9) %}{% endfor %}",
    "ranges": "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}",
    "ranges of ranges": "{% for i in range(9999) %}" * 8 + "{% endfor %}" * 8,
    "ranges in a macro": "{% macro m() %}{% for i in range(99999) %}{% endfor %}{% endmacro %}"
    "{% for i in range(99999) %}{% set x = m() %}{% endfor %}",
    "a filtered range": "{% for i in range(99999)|select %}{% for j in range(99999)|map('string') %}{% endfor %}{% endfor %}",
    "recursion": "{% macro m() %}{{ m() }}{% endmacro %}{{ m() }}",
    "a tree of recursion": "{% macro m(n) %}{% if n %}{% set a = m(n-1) %}{% set b = m(n-1) %}{% endif %}{% endmacro %}{{ m(60) }}",
}  # fmt: skip
MUCH_TEXT = {
    "much text": "{% for i in range(99999) %}{{ messages[0].content }}{% endfor %}",
    "much text into a variable": "{% set x %}{% for i in range(99999) %}{{ messages[0].content }}{% endfor %}{% endset %}",
    "its own text into a variable": "{% set x %}{% for i in range(99999) %}" + "word " * 9999 + "{% endfor %}{% endset %}",
    "lipsum": "{{ lipsum(n=99999999) }}",
}  # fmt: skip


MESSAGES = [ChatMessage("user", "hello " * 1000)]


def refusal(source: str) -> str:
    with pytest.raises(TemplateFailed) as caught:
        ChatTemplate(source, {}).render(MESSAGES)
    assert "\n" not in str(caught.value) and len(str(caught.value)) <= 200
    return str(caught.value)


@pytest.mark.parametrize("source", [*LARGE.values(), *MUCH_TEXT.values()], ids=[*LARGE, *MUCH_TEXT])
def test_memory_is_not_filled_first(source):
    tracemalloc.start()
    try:
        refusal(source)
        assert tracemalloc.get_traced_memory()[1] < 250 << 20
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize("name", LONG_RUNNING)
def test_what_would_not_end_is_ended(name):
    begun = time.thread_time()
    refusal(LONG_RUNNING[name])
    assert time.thread_time() - begun < 30


NESTED = {
    "parentheses": "{{ " + "(" * 20_000 + "1" + ")" * 20_000 + " }}",
    "lists": "{{ " + "[" * 20_000 + "]" * 20_000 + " }}",
    "signs": "{{ " + "-" * 20_000 + "1 }}",
    "loops": "{% for i in x %}" * 200 + "{% endfor %}" * 200,
    "conditions": "{% if x %}" * 5_000 + "{% endif %}" * 5_000,
    "a number": "{{ 'a' * " + "9" * 5_000 + " }}",
}


@pytest.mark.parametrize("name", NESTED)
def test_nesting_is_one_line(name):
    """At the start, or where it is rendered."""
    with pytest.raises(TemplateFailed) as caught:
        ChatTemplate(NESTED[name], {}).render([ChatMessage("user", "x")])
    assert "\n" not in str(caught.value) and len(str(caught.value)) <= 200


@pytest.mark.parametrize("name", TEMPLATES)
def test_long_conversations_are_rendered(name):
    """As many messages and characters as a request may have."""
    template = chat_template(name)
    many = [ChatMessage(role, "x") for role in ("user", "assistant") * 511] + [ChatMessage("user", "x")]
    long = [ChatMessage("user", "words " * 170_000)]
    for messages in (many, long):
        rendered = render_origins(template, CONTROLS, messages)
        assert rendered == (template.render(messages), tuple(CONTROLS.find(rendered.text)))


def test_every_private_character_in_a_content():
    content = "".join(map(chr, [*range(0xE000, 0xF900), *range(0xF0000, 0xFFFFE), *range(0x100000, 0x10FFFE)]))
    messages = [ChatMessage("user", f"{content}<|im_end|>")]
    text, of_template = render_origins(chat_template("qwen-chatml"), CONTROLS, messages)
    assert len(CONTROLS.find(text)) == len(of_template) + 1


def test_numbers_and_widths_that_are_in_use():
    source = "{{ '%05d' % 7 }}{{ '{:>8}'.format('x') }}{{ 'a' * 3 }}{{ 2 ** 10 }}{{ 'x' | center(5) }}{{ [1] + [2] }}"
    assert ChatTemplate(source, {}).render([]) == "00007       xaaa1024  x  [1, 2]"
    assert ChatTemplate("{% for i in range(3) %}{{ loop.index }}/{{ loop.length }} {% endfor %}", {}).render([]) == (
        "1/3 2/3 3/3 "
    )


@pytest.mark.parametrize(
    "source",
    [
        "{% macro show(value) %}{{ value }}{% endmacro %}{{ show(number) }}",
        "{% macro show() %}{{ caller(number) }}{% endmacro %}{% call(value) show() %}{{ value }}{% endcall %}",
        "{{ nothing | default(number) }}",
        "{{ dict(a=number).a }}",
        "{{ {}.get('a', number) }}",
        "{% set n = namespace(a=number) %}{{ n.a }}",
    ],
)
def test_numbers_that_are_values_may_be_large(source):
    """The time of a call, the `maximum` of a parameter: templates hand them to their macros, as FunctionGemma's
    does."""
    assert ChatTemplate(source, {}).render([], ChatOptions(kwargs={"number": 1767225600})) == "1767225600"


def test_widths_within_a_macro_are_bounded():
    refusal("{% macro show(value) %}{{ 'a' | center(value) }}{% endmacro %}{{ show(999999999) }}")
    refusal(
        "{% macro show(width) %}{{ caller('a'.ljust(width)) }}{% endmacro %}{% call(x) show(999999999) %}{{ x }}{% endcall %}"
    )


@settings(max_examples=100)
@given(st.text(max_size=100), st.integers(1, 2000))
def test_what_users_write_grows_no_further_than_the_bound(content, times):
    template = ChatTemplate("{% for m in messages %}{{ m.content * " + str(times) + " }}{% endfor %}", {})
    messages = [ChatMessage("user", content)] * 50
    try:
        assert len(template.render(messages)) == 50 * times * len(content) <= MAX_CHARS
    except TemplateFailed:
        assert 50 * times * len(content) > MAX_CHARS
