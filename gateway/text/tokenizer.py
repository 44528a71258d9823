"""Turn text into token ids as transformers does, except that a client's text becomes a control token only if the caller
asks for that, and that BOS and EOS are put around a text where tokenizer_config.json says so."""

import json
import math
import os
import re
from collections import Counter
from collections.abc import Sequence
from typing import Any

import tokenizers
from tokenizers.pre_tokenizers import ByteLevel
from tokenizers.processors import TemplateProcessing

from baton.constraints.constraint import MAX_TOKEN_IDS
from baton.lines import one_line
from baton.service.settings import SettingsError
from gateway.text.control_tokens import ControlTokens, Match
from gateway.text.origins import Rendered

# The calling thread alone encodes a text: TextThreads has counted no other as the tenant's.
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

_PARTS = ("normalizer", "pre_tokenizer", "post_processor", "decoder")
_FLAGS = ("single_word", "lstrip", "rstrip", "normalized")
# Steps that remove no characters, and steps that compose several into one, four at most.
_KEEPING, _COMPOSING = ("ByteLevel", "Metaspace", "Digits", "Prepend", "NFD", "NFKD", "Lowercase"), ("NFC", "NFKC")
_MOST_COMPOSED = 4
# Tags that are ordinary words in Gemma's vocabulary, without <s> and </s>, which are BOS and EOS elsewhere.
_HTML = re.compile(r"</?(table|caption|thead|tbody|tfoot|tr|th|td|h[1-6]|blockquote|strong|em|b|i|u|sub|sup|code)>")
_BEFORE = "☺"  # never joins the text behind it; makers of SentencePiece models use it too


class CannotEncode(Exception):
    """The tokenizer fails on a text; the message is the tokenizer's own, on one line."""


class ControlTokenInContent(Exception):
    """The template moves content such that its control tokens cannot be distinguished from the template's."""


class Tokenizer:
    """The tokenizer of one tokenizer.json. Immutable after the start, so threads may share it; the library releases
    Python's lock while it encodes.

    A control token is one that the file calls special, or an added token written like a tag, <...> or [...], but not an
    HTML tag.
    """

    def __init__(
        self, tokenizer_json: bytes, name: str = "tokenizer.json", begin: str | None = None, end: str | None = None
    ):
        """Read a tokenizer. `begin`, `end`: tokens to put around a text even if the file does not (DeepSeek names its
        own in tokenizer_config.json alone). Raises SettingsError if the file is no tokenizer, or one of an unknown
        kind."""
        self.json = tokenizer_json
        self._normal = _load(tokenizer_json, name)
        vocabulary = self._normal.get_vocab()
        if (most := max(vocabulary.values(), default=0)) >= MAX_TOKEN_IDS:
            raise SettingsError(f"{name}: a token has id {most}, at most {MAX_TOKEN_IDS - 1} is believed")
        _put_around(self._normal, begin, end)
        content = json.loads(tokenizer_json)
        self.added = {token["id"]: token for token in content.get("added_tokens") or ()}
        self._controls = {token["content"]: token for token in self.added.values() if _is_control(token)}
        self.controls = ControlTokens(self._controls)
        # `_plain` finds no control tokens; `_behind` neither, and is for text that follows a control token.
        self._plain = self._behind = _without_control(self._normal, content.get("added_tokens") or [])
        if (own := content.get("pre_tokenizer")) != (behind := _without_first(own)):
            self._behind = _without_control(self._normal, content.get("added_tokens") or [])
            self._behind.pre_tokenizer = _pre_tokenizer(behind)
        self.decoder_steps = [step["type"] for step in _steps(content.get("decoder"))]
        self.is_byte_level = _is_byte_level(self.decoder_steps, name)
        self._normalizer = self._normal.normalizer
        self._normalizes = any(token.get("normalized") for token in self._controls.values())
        self._chars_per_token = _most_chars_per_token(content, vocabulary)

    @property
    def special_ids(self) -> frozenset[int]:
        """The ids of special tokens, which have no text."""
        return frozenset(token_id for token_id, token in self.added.items() if token.get("special"))

    @property
    def control_ids(self) -> dict[str, int]:
        """The ids of control tokens by their text."""
        return {content: token["id"] for content, token in self._controls.items()}

    @property
    def decoder(self) -> tokenizers.Tokenizer:
        """The library's tokenizer, which decodes token ids."""
        return self._normal

    def encode_text(self, text: str, spells_controls: bool = False) -> list[int]:
        """Return the token ids of a client's text, with the tokenizer's own special tokens (BOS) around it.
        `spells_controls`: text that spells a control token becomes that token. Raises CannotEncode."""
        tokenizer = self._plain if not spells_controls and self._spelled(text) else self._normal
        return _encode(tokenizer, [text], add_special_tokens=True)[0].ids

    @property
    def own_ids(self) -> tuple[list[int], list[int]]:
        """The special tokens that the tokenizer puts before a text, and behind it."""
        return _around(self._plain)

    def encode_plain(self, text: str, continues: bool = False) -> list[int]:
        """Return the token ids of a client's text, none of which is a special or control token. `continues`: the text
        continues another one, so its first word gets no extra space. Raises CannotEncode."""
        if not continues or self.is_byte_level:
            return _encode(self._plain, [text])[0].ids
        before, both = (each.ids for each in _encode(self._plain, [_BEFORE, _BEFORE + text]))
        return both[len(before) :]

    def only_token(self, text: str) -> int | None:
        """Return the single token id that a text encodes to, or None if there is not just one."""
        ids = self.encode_plain(text)
        return ids[0] if len(ids) == 1 else None

    def encode_chat(self, rendered: Rendered) -> list[int]:
        """Return the token ids of a rendered conversation. Raises ControlTokenInContent, CannotEncode."""
        text, of_template = rendered
        if of_template is None:
            raise ControlTokenInContent
        if self._spelled(text) <= Counter(text[begin:end] for begin, end in of_template):
            return _encode(self._normal, [text])[0].ids
        return self._encode_around(text, of_template)

    def can_fit(self, num_chars: int, num_tokens: int) -> bool:
        """Return whether a text of `num_chars` characters could have at most `num_tokens` tokens, without encoding
        it."""
        return num_chars <= num_tokens * self._chars_per_token

    def may_spell_control(self, text: str) -> bool:
        """Return whether `text` may spell a control token, alone or together with the text that follows it."""
        return self.controls.may_begin_in(text)

    def _spelled(self, text: str) -> Counter[str]:
        """Return how often the library might find each control token in `text`."""
        found = Counter(text[begin:end] for begin, end in self.controls.find(text))
        if self._normalizes and self._normalizer:
            normalized = self._normalizer.normalize_str(text)
            found |= Counter(normalized[begin:end] for begin, end in self.controls.find(normalized))
        return found

    def _encode_around(self, text: str, of_template: Sequence[Match]) -> list[int]:
        pieces, position, strip = [], 0, False
        for begin, end in of_template:
            control = self._controls[text[begin:end]]
            pieces.append(_stripped(text[position:begin], strip, control.get("lstrip", False)))
            position, strip = end, control.get("rstrip", False)
        pieces.append(_stripped(text[position:], strip, False))
        encoded = [*_encode(self._plain, pieces[:1]), *_encode(self._behind, pieces[1:])]
        token_ids = encoded[0].ids
        for (begin, end), piece in zip(of_template, encoded[1:], strict=True):
            token_ids.append(self._controls[text[begin:end]]["id"])
            token_ids += piece.ids
        return token_ids


def _encode(tokenizer: tokenizers.Tokenizer, texts: list[str], add_special_tokens: bool = False) -> list:
    """Encode texts. A batch, since `encode` of one text would hold Python's lock all the while (2 MB on a busy machine:
    4.6 s).

    Raises CannotEncode, also when a regular expression backtracks for too long: then the library panics, which is no
    Exception."""
    try:
        return tokenizer.encode_batch_fast(texts, add_special_tokens=add_special_tokens)
    except BaseException as error:
        if not isinstance(error, Exception) and type(error).__name__ != "PanicException":
            raise
        raise CannotEncode(one_line(error, 200)) from None


def _stripped(text: str, left: bool, right: bool) -> str:
    text = text.lstrip() if left else text
    return text.rstrip() if right else text


def _load(tokenizer_json: bytes, name: str) -> tokenizers.Tokenizer:
    try:
        tokenizer = tokenizers.Tokenizer.from_buffer(tokenizer_json)
    except Exception as error:  # the bindings raise bare Exception
        raise SettingsError(f"{name}: not a tokenizer: {one_line(error, 200)}") from None
    tokenizer.no_truncation()
    tokenizer.no_padding()
    return tokenizer


def _put_around(tokenizer: tokenizers.Tokenizer, begin: str | None, end: str | None) -> None:
    """Have the tokenizer put `begin` and `end` around each text, beside its own special tokens. A token that is there
    already, or is not in the vocabulary, is not added."""
    first, last = (None if token is None else tokenizer.token_to_id(token) for token in (begin, end))
    if first is None and last is None:
        return
    own = before, behind = _around(tokenizer)
    if first is not None and first not in before[:1]:
        before = [first, *before]
    if last is not None and last not in behind[-1:]:
        behind = [*behind, last]
    if (before, behind) != own:
        names = {id_: tokenizer.id_to_token(id_) for id_ in (*before, *behind)}
        single = [*(names[id_] for id_ in before), "$A", *(names[id_] for id_ in behind)]
        special = [(name, id_) for id_, name in names.items()]
        tokenizer.post_processor = TemplateProcessing(single=single, special_tokens=special)


def _around(tokenizer: tokenizers.Tokenizer) -> tuple[list[int], list[int]]:
    """Return the special tokens that a tokenizer puts before a text, and behind it."""
    text, whole = (tokenizer.encode("a", add_special_tokens=around).ids for around in (False, True))
    at = next((at for at in range(len(whole)) if whole[at : at + len(text)] == text), 0)
    return whole[:at], whole[at + len(text) :]


def _without_control(tokenizer: tokenizers.Tokenizer, added_tokens: list[dict]) -> tokenizers.Tokenizer:
    """Return a tokenizer that shares the same vocabulary and finds no control tokens."""
    plain = tokenizers.Tokenizer(tokenizer.model)
    for part in _PARTS:
        setattr(plain, part, getattr(tokenizer, part))
    plain.add_tokens([_added(token) for token in added_tokens])
    plain.encode_special_tokens = True
    return plain


def _without_first(part: Any) -> Any:
    """Return a pre-tokenizer for text that does not begin a prompt: it puts no space before the first word."""
    if isinstance(part, dict):
        kept = {key: _without_first(value) for key, value in part.items()}
        return kept | ({"prepend_scheme": "never"} if part.get("prepend_scheme") == "first" else {})
    return list(map(_without_first, part)) if isinstance(part, list) else part


def _pre_tokenizer(content: dict) -> tokenizers.pre_tokenizers.PreTokenizer:
    parts = dict.fromkeys(("truncation", "padding", "normalizer", "post_processor", "decoder"))
    model = {"type": "BPE", "vocab": {}, "merges": []}
    whole = {"version": "1.0", **parts, "added_tokens": [], "pre_tokenizer": content, "model": model}
    return tokenizers.Tokenizer.from_str(json.dumps(whole)).pre_tokenizer


def _added(token: dict) -> tokenizers.AddedToken:
    flags = {name: token[name] for name in _FLAGS if name in token}
    return tokenizers.AddedToken(token["content"], special=token.get("special", False) or _is_control(token), **flags)


def _is_control(token: dict) -> bool:
    content = token["content"]
    is_tag = content[:1] + content[-1:] in ("<>", "[]") and not _HTML.fullmatch(content)
    return bool(content.strip()) and (token.get("special", False) or is_tag)


def _most_chars_per_token(content: dict, vocabulary: dict[str, int]) -> float:
    """Return the most characters that one token can stand for.

    That is infinite if a token stands for any unknown text or swallows the white space beside it, or if a step removes
    characters."""
    model, steps = content["model"], [*_steps(content.get("normalizer")), *_steps(content.get("pre_tokenizer"))]
    swallows = any(token.get("lstrip") or token.get("rstrip") for token in content.get("added_tokens") or ())
    kinds = {step["type"] for step in steps}
    alphabet = ByteLevel.alphabet() if "ByteLevel" in kinds else [f"<0x{value:02X}>" for value in range(256)]
    knows_all = ("ByteLevel" in kinds or model.get("byte_fallback")) and vocabulary.keys() >= set(alphabet)
    if swallows or not knows_all or not all(map(_keeps, steps)):
        return math.inf
    return max(map(len, vocabulary)) * (_MOST_COMPOSED if kinds.intersection(_COMPOSING) else 1)


def _is_byte_level(decoder_steps: Sequence[str], name: str) -> bool:
    """Return whether the bytes of a text are its tokens' bytes, joined. Raises SettingsError for a decoder that changes
    these in an unknown way, or by their position in the text."""
    if "BPEDecoder" in decoder_steps:
        raise SettingsError(f"{name}: its decoder is BPEDecoder, which is not served")
    if "ByteLevel" not in decoder_steps:
        return False
    if others := sorted({*decoder_steps} - {"ByteLevel", "Fuse"}):
        message = f"its decoder has {', '.join(others)} beside ByteLevel, at most Fuse is known there"
        raise SettingsError(f"{name}: {message}")
    return True


def _steps(part: dict | None) -> list[dict]:
    """Return the steps of a normalizer, pre-tokenizer or decoder: the parts of a sequence, or itself."""
    if part is None:
        return []
    inner = part.get("normalizers") or part.get("pretokenizers") or part.get("decoders")
    # The library accepts steps without a type, or with one that is no string.
    return [step for each in inner for step in _steps(each)] if inner else [{**part, "type": str(part.get("type"))}]


def _keeps(step: dict) -> bool:
    """Return whether a step removes no characters."""
    if step["type"] == "Replace":
        return "String" in step["pattern"] and len(step["content"]) >= len(step["pattern"]["String"])
    if step["type"] == "Split":
        return step["behavior"] != "Removed"
    return step["type"] in (*_KEEPING, *_COMPOSING)
