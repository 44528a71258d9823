"""Evaluation counts every held-out token once and cuts completions where a function ends."""

import ast

import pytest
import torch

from baton.training.data.corpus import Document
from baton.training.data.tokenizer import train_tokenizer
from baton.training.model.evaluate import agreement, cut_function, evaluate, judge, select_heads, total_bits
from baton.training.model.llama import Llama, ModelConfig

CONFIG = ModelConfig(280, 32, 64, num_layers=1, num_heads=2, num_kv_heads=1, head_dim=16, max_length=16)
MODULE = Document(
    "m.py",
    '''class A:
    def long(
        self,
        x=1,
    ):
        """Text."""
        a = x

        return a

    def short(self):
        return 1


def last(y):  # why:
    a = 1
    b = 2
    c = 3
    return a
''',
)


@pytest.fixture(scope="module")
def model():
    torch.manual_seed(0)
    return Llama(CONFIG).eval()


def test_total_bits_count_each_token_once(model):
    """An untrained model with zeroed layers predicts from the last token alone, so windows must not matter."""
    text = torch.randint(0, 280, (53,))
    with torch.inference_mode():
        log_probs = model(text[None, :-1])[0].log_softmax(-1).gather(1, text[1:, None])
    assert total_bits(model, [text]) == pytest.approx(-log_probs.sum().item() / 0.6931471805599453, rel=1e-4)


def test_a_model_agrees_with_itself(model):
    assert agreement(model, model, [torch.randint(0, 280, (40,))]) == 1.0


def test_heads_are_long_functions_cut_after_the_colon():
    heads = select_heads([MODULE], 50)
    assert sorted(head.name for head in heads) == ["last", "long"]
    by_name = {head.name: head for head in heads}
    assert by_name["long"].definition == "    def long(\n        self,\n        x=1,\n    ):"
    assert by_name["last"].definition == "def last(y):  # why:"


@pytest.mark.parametrize(
    ("text", "kept"),
    [
        ("def f():\n    a = 1\n    b = 2\nc = 3\n", "def f():\n    a = 1\n    b = 2\n"),
        ("def f():\n    a = 1\n    b = (2,\n", "def f():\n    a = 1\n"),
        ("def f():\n    a = 1\n    if a:\n        b()\n    else:\n        c(", "def f():\n    a = 1\n"),
        ("    def f():\n        a = 1\n\n    def g():\n", "if True:\n    def f():\n        a = 1\n\n"),
        ("def f():\n    a = 1\n    # note\n    b = '''half", "def f():\n    a = 1\n    # note\n"),
    ],
)
def test_a_function_is_cut_at_its_last_whole_statement(text, kept):
    assert cut_function(text) == kept
    ast.parse(kept)


@pytest.mark.parametrize(
    ("completion", "verdict"),
    [
        ("\n    return 1\n\nx", "parsed"),
        ("\n    return 1 +\n    a\n\nx", "wrong"),
        ("\n    '''never ending", "unfinished"),
        ("\n    # never\n    # doing", "unfinished"),
        ("\n", "unfinished"),
        ("", "unfinished"),
    ],
)
@pytest.mark.parametrize("indent", ["", "    "])
def test_a_completion_needs_one_whole_statement(completion, verdict, indent):
    assert judge(completion.replace("\n", "\n" + indent), f"{indent}def f():") == verdict


def test_all_figures_are_there(model):
    tokenizer = train_tokenizer([MODULE.text * 5], 280)
    figures = evaluate(model, model, tokenizer, [MODULE], num_heads=1)
    assert figures["held_out_bytes"] == MODULE.num_bytes
    assert figures["function_heads"] == 1 and figures["draft_agreement"] == 1.0
    assert figures["draft_agreement_on_completions"] > 0.9  # cached and whole passes may round a near tie apart
    assert figures["target_bits_per_byte"] == figures["draft_bits_per_byte"] > 0
