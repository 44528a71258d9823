"""Control tokens in texts: as the naive search finds them, at a cost that depends on the text and not on their
number."""

import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gateway.text.control_tokens import ControlTokens
from gateway.text.origins import render_origins
from gateway.text.templates import ChatMessage, ChatTemplate
from gateway.text.tokenizer import Tokenizer
from tests.support.gateway.naive_text import control_tokens
from tests.support.gateway.small_tokenizers import byte_level

LETTERS = "<a>|é🙂"
TOKENS = st.lists(st.text(LETTERS, min_size=1, max_size=5), max_size=6, unique=True)
NUM_UNUSED = 6242  # Gemma 3's


@settings(max_examples=500)
@given(st.text(LETTERS, max_size=40), TOKENS)
def test_found_as_the_naive_search_does(text, controls):
    assert ControlTokens(controls).find(text) == control_tokens(text, controls)


@settings(max_examples=500)
@given(st.text(LETTERS, max_size=12), st.text(LETTERS, max_size=5), TOKENS)
def test_none_begins_in_a_text_unseen(text, behind, controls):
    found = ControlTokens(controls)
    if not found.may_begin_in(text):
        assert all(begin >= len(text) for begin, _ in found.find(text + behind))


@pytest.fixture(scope="module")
def many() -> Tokenizer:
    """As Gemma 3 has it."""
    return Tokenizer(byte_level(unspecial=tuple(f"<unused{i}>" for i in range(NUM_UNUSED))))


@pytest.fixture(scope="module")
def few() -> Tokenizer:
    return Tokenizer(byte_level())


def cpu_s(work) -> float:
    begun = time.process_time()
    work()
    return time.process_time() - begun


@pytest.mark.parametrize("word", ["<unused", "a<b>", "the fox ", "<|user|>", "<"])
def test_thousands_of_control_tokens_cost_what_a_dozen_do(few, many, word):
    """A mebibyte of chat against 6,242 took 7.9 s of the event loop once, before it was even encoded."""
    text = (word * 200_000)[: 1 << 19]

    def search(tokenizer):
        tokenizer.may_spell_control(text)
        tokenizer._spelled(text)

    search(many)
    usual = min(cpu_s(lambda: search(few)) for _ in range(3))
    assert min(cpu_s(lambda: search(many)) for _ in range(3)) < 4 * usual + 0.05


def test_the_cost_grows_with_the_text_alone(few):
    """A conversation of control tokens with four times the messages once took 27 times as long."""
    template = ChatTemplate("{% for m in messages %}<|user|>{{ m['content'] }}<|end|>{% endfor %}", {})

    def encode(num_messages: int) -> None:
        rendered = render_origins(template, few.controls, [ChatMessage("user", "<|user|>" * 5)] * num_messages)
        assert len(rendered.of_template) == 2 * num_messages
        few.encode_chat(rendered)

    cost = {n: min(cpu_s(lambda n=n: encode(n)) for _ in range(3)) for n in (200, 1600)}
    assert cost[1600] < 20 * cost[200]
