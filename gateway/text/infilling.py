"""Write infilling prompts (fill-in-the-middle): control tokens around the texts before and behind the answer."""

from typing import NamedTuple

from gateway.text.tokenizer import Tokenizer

_PREFIX, _SUFFIX = "{prefix}", "{suffix}"


class _Form(NamedTuple):
    """The prompt of one family of models. `parts`: control tokens and both texts, in order; `ends`: control tokens that
    end an answer, beside the model's own."""

    parts: tuple[str, ...]
    ends: tuple[str, ...] = ()


# In the order that the models' makers use. An answer of Codestral directly follows the prefix.
_FORMS = (
    _Form(  # Qwen-coder, CodeGemma, Granite
        ("<|fim_prefix|>", _PREFIX, "<|fim_suffix|>", _SUFFIX, "<|fim_middle|>"),
        ("<|endoftext|>", "<|fim_pad|>", "<|repo_name|>", "<|file_sep|>", "<|file_separator|>"),
    ),
    _Form(  # StarCoder
        ("<fim_prefix>", _PREFIX, "<fim_suffix>", _SUFFIX, "<fim_middle>"),
        ("<|endoftext|>", "<fim_pad>", "<repo_name>", "<file_sep>"),
    ),
    _Form(("▁<PRE>", _PREFIX, "▁<SUF>", _SUFFIX, "▁<MID>"), ("▁<EOT>",)),  # CodeLlama
    _Form(("<｜fim▁begin｜>", _PREFIX, "<｜fim▁hole｜>", _SUFFIX, "<｜fim▁end｜>")),  # DeepSeek
    _Form(("[SUFFIX]", _SUFFIX, "[PREFIX]", _PREFIX)),  # Codestral
)


class Infilling:
    """Write the infilling prompts of one model. Immutable, so threads may share it."""

    def __init__(self, tokenizer: Tokenizer, form: _Form, ids: dict[str, int]):
        self.end_ids = frozenset(ids[token] for token in form.ends if token in ids)
        self._tokenizer, self._parts = tokenizer, [ids.get(part, part) for part in form.parts]

    def encode(self, prefix: str, suffix: str) -> list[int]:
        """Return the token ids of a prompt; neither text can spell a control token in it. Raises CannotEncode."""
        token_ids = self._tokenizer.own_ids[0]
        for part in self._parts:
            if isinstance(part, int):
                token_ids.append(part)
            elif part == _PREFIX:
                token_ids += self._tokenizer.encode_plain(prefix)
            else:  # it continues the answer
                token_ids += self._tokenizer.encode_plain(suffix, continues=True)
        return token_ids


def find_infilling(tokenizer: Tokenizer) -> Infilling | None:
    """Return the infilling of a tokenizer, or None. Its tokens must all be control tokens: a client's text could spell
    others."""
    ids = tokenizer.control_ids
    known = {*ids, _PREFIX, _SUFFIX}
    form = next((form for form in _FORMS if known.issuperset(form.parts)), None)
    return form and Infilling(tokenizer, form, ids)
