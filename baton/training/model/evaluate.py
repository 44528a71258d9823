"""Evaluate on held-out modules: bits per byte, completed functions that parse, agreement of draft and target."""

from __future__ import annotations

import ast
import io
import math
import tokenize
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from tokenizers import Tokenizer
from torch import Tensor

from baton.training.data.corpus import Document
from baton.training.data.tokenizer import END_OF_TEXT
from baton.training.model.llama import Llama

PROMPT_TOKENS = 512
COMPLETION_TOKENS = 256


@dataclass(frozen=True)
class FunctionHead:
    """The text of a module up to the end of a `def` line; the definition begins at `start`."""

    module: str
    name: str
    text: str
    start: int

    @property
    def definition(self) -> str:
        """The head alone, with its indentation and without a line break at the end."""
        return self.text[self.start :]


@dataclass(frozen=True)
class Completion:
    """A prompt, the tokens that a model wrote after it, and their text."""

    prompt_ids: list[int]
    written_ids: list[int]
    text: str


def evaluate(
    target: Llama, draft: Llama, tokenizer: Tokenizer, held_out: Sequence[Document], num_heads: int = 50
) -> dict:
    """Return all figures on the held-out documents, as plain values."""
    texts = [token_ids(tokenizer, document) for document in held_out]
    num_bytes = sum(document.num_bytes for document in held_out)
    heads = select_heads(held_out, num_heads)
    completions = [complete(target, tokenizer, head) for head in heads]
    verdicts = [judge(c.text, head.definition) for c, head in zip(completions, heads, strict=True)]
    return {
        "held_out_bytes": num_bytes,
        "held_out_tokens": sum(len(text) - 1 for text in texts),
        "target_bits_per_byte": round(total_bits(target, texts) / num_bytes, 4),
        "draft_bits_per_byte": round(total_bits(draft, texts) / num_bytes, 4),
        "function_heads": len(heads),
        "function_heads_parsed": verdicts.count("parsed"),
        "function_heads_unfinished": verdicts.count("unfinished"),
        "draft_agreement": round(agreement(target, draft, texts), 4),
        "draft_agreement_on_completions": round(agreement_on_completions(draft, completions), 4),
    }


@torch.inference_mode()
def total_bits(model: Llama, texts: Iterable[Tensor]) -> float:
    """Return the bits that the model needs for all tokens except the first of each text [length]."""
    nats = 0.0
    for window, num_scored in _windows(texts, model.config.max_length):
        log_probs = F.log_softmax(model(window[None, :-1])[0], dim=-1)
        nats -= log_probs.gather(1, window[1:, None])[-num_scored:].sum().item()
    return nats / math.log(2)


@torch.inference_mode()
def agreement(target: Llama, draft: Llama, texts: Iterable[Tensor]) -> float:
    """Return the share of positions at which both models, given the same text, would choose the same next token.
    `texts`: token ids, int64 [tokens] each."""
    same = total = 0
    for window, num_scored in _windows(texts, target.config.max_length):
        choices = [model(window[None, :-1])[0, -num_scored:].argmax(-1) for model in (target, draft)]
        same += (choices[0] == choices[1]).sum().item()
        total += num_scored
    return same / total


@torch.inference_mode()
def agreement_on_completions(draft: Llama, completions: Iterable[Completion]) -> float:
    """Return the share of the target's own greedy tokens that the draft would have chosen, as in speculation."""
    same = total = 0
    for completion in completions:
        written = torch.tensor(completion.written_ids)
        token_ids = torch.tensor(completion.prompt_ids + completion.written_ids)
        choices = draft(token_ids[None, :-1])[0, len(completion.prompt_ids) - 1 :].argmax(-1)
        same += (choices == written).sum().item()
        total += len(written)
    return same / max(1, total)


def select_heads(documents: Iterable[Document], count: int) -> list[FunctionHead]:
    """Return up to `count` functions of at least four lines, evenly spread over the documents."""
    heads = [head for document in documents for head in _heads(document)]
    count = min(count, len(heads))
    return [heads[i * len(heads) // count] for i in range(count)]


@torch.inference_mode()
def complete(model: Llama, tokenizer: Tokenizer, head: FunctionHead) -> Completion:
    """Return the model's greedy continuation of the last 512 tokens up to the head; at most 256 tokens."""
    end = tokenizer.token_to_id(END_OF_TEXT)
    prompt_ids = tokenizer.encode(head.text).ids[-PROMPT_TOKENS:]
    cache, written_ids, newest = model.new_cache(), [], prompt_ids
    while len(written_ids) < COMPLETION_TOKENS:
        token_id = model(torch.tensor([newest]), cache)[0, -1].argmax().item()
        if token_id == end:
            break
        written_ids.append(token_id)
        newest = [token_id]
    return Completion(prompt_ids, written_ids, tokenizer.decode(written_ids))


def judge(completion: str, definition: str) -> str:
    """Return whether the completed function is Python: "parsed", "wrong", or "unfinished" if no complete statement was
    written.

    The text is cut where the function ends, or else after its last complete statement."""
    function = cut_function(definition + completion)
    if definition not in function:
        return "unfinished"
    try:
        ast.parse(function)
    except (SyntaxError, ValueError):
        return "wrong"
    return "parsed"


def cut_function(text: str) -> str:
    """Cut the text after the function that opens it; if the function does not end, before its last statement, which may
    be incomplete.

    An indented function is returned below an `if True:`, so that it parses unchanged."""
    lines = text.splitlines(keepends=True)
    indent = len(lines[0]) - len(lines[0].lstrip())
    wrapped = (["if True:\n"] if indent else []) + lines
    depth = 1 if indent else 0
    starts = [line for line, level in _statements(wrapped) if level <= depth + 1]
    ends = [line for line, level in _statements(wrapped) if level <= depth][1 + depth :]
    last = ends[0] if ends else starts[-1]
    return "".join(wrapped[:last])


def _statements(lines: list[str]) -> Iterator[tuple[int, int]]:
    """Yield the first line (from 0) and the indentation level of each statement, up to where tokenizing fails."""
    level, at_start = 0, True
    skipped = {tokenize.NL, tokenize.COMMENT, tokenize.ENDMARKER}
    try:
        for token in tokenize.generate_tokens(io.StringIO("".join(lines)).readline):
            if token.type in (tokenize.INDENT, tokenize.DEDENT):
                level += 1 if token.type == tokenize.INDENT else -1
            elif at_start and token.type not in skipped:
                at_start = False
                if token.string not in ("elif", "else", "except", "finally"):
                    yield token.start[0] - 1, level
            elif token.type == tokenize.NEWLINE:
                at_start = True
    except (tokenize.TokenError, IndentationError):
        return


def _heads(document: Document) -> Iterator[FunctionHead]:
    lines = document.text.splitlines(keepends=True)
    for node in ast.walk(ast.parse(document.text)):
        if not isinstance(node, ast.FunctionDef):
            continue
        head_end = _head_end(lines, node)
        if (node.end_lineno or 0) - head_end >= 4 and head_end < node.body[0].lineno:
            start = sum(map(len, lines[: node.lineno - 1]))
            yield FunctionHead(document.path, node.name, "".join(lines[:head_end]).rstrip("\n"), start)


def _head_end(lines: list[str], node: ast.FunctionDef) -> int:
    """Return the number of the last line of the head, from 1."""
    line = node.lineno
    while not lines[line - 1].split("#")[0].rstrip().endswith(":") and line < node.body[0].lineno:
        line += 1
    return line


def token_ids(tokenizer: Tokenizer, document: Document) -> Tensor:
    return torch.tensor([tokenizer.token_to_id(END_OF_TEXT), *tokenizer.encode(document.text).ids])


def _windows(texts: Iterable[Tensor], length: int) -> Iterator[tuple[Tensor, int]]:
    """Yield windows of up to `length` + 1 tokens, and how many of their last tokens are scored.

    They advance by half a window, so all but the first half of a text is scored with at least that much context."""
    for text in texts:
        scored = 1
        while scored < len(text):
            end = min(len(text), max(length + 1, scored + length // 2))
            yield text[max(0, end - length - 1) : end], end - scored
            scored = end
