"""Convert the tokenizer of a .gguf file to the tokenizer.json that its model had before its conversion.

Kinds and rules are those of llama.cpp's llama-vocab.cpp: `gpt2` is byte-level BPE with a named splitting rule, and
`llama` is SentencePiece BPE, whose merges follow from the scores of its pieces."""

from typing import NamedTuple

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors

from baton.gguf import CONTROL, FLAG, INTEGER, INTEGERS, NUMBERS, TEXT, TEXTS, USER_DEFINED, GGUFError, GGUFHeader
from baton.lines import one_line

NORMAL, UNKNOWN = 1, 2  # token types besides CONTROL and USER_DEFINED
MAX_TOKEN_CHARS = 1024  # every split of a token is looked up as a merge
SPACE = "\u2581"  # SentencePiece's character for a space
GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
WORDS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+"
REST = r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
TEKKEN = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+"
    r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*"
    r"|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)


class _Rule(NamedTuple):
    """The splitting rule of a byte-level vocabulary."""

    splits: tuple[str, ...]  # expressions, applied one after the other
    normalizer: str = ""  # NFC, or none
    whole_words: bool = False  # a word of the vocabulary becomes one token, whatever the merges say
    add_bos: bool = False  # if the file does not say


_LLAMA3_SPLITS = (WORDS + r"|\p{N}{1,3}" + REST,)
_LLAMA3 = _Rule(_LLAMA3_SPLITS, whole_words=True, add_bos=True)
_QWEN2 = _Rule((WORDS + r"|\p{N}" + REST,), normalizer="NFC")
RULES = {
    "gpt-2": _Rule((GPT2,)),
    "llama-bpe": _LLAMA3,
    "llama-v3": _LLAMA3,
    "llama3": _LLAMA3,
    "smaug-bpe": _Rule(_LLAMA3_SPLITS),
    "qwen2": _QWEN2,
    "deepseek-r1-qwen": _QWEN2,
    "smollm": _Rule((r"\p{N}", GPT2)),
    "tekken": _Rule((TEKKEN,), whole_words=True, add_bos=True),
}


def tokenizer_json(header: GGUFHeader) -> bytes:
    """Return the file's vocabulary as a tokenizer.json. Raises GGUFError for an unknown kind, or a file without a
    vocabulary."""
    tokens, types = header.get("tokenizer.ggml.tokens", TEXTS), header.get("tokenizer.ggml.token_type", INTEGERS)
    if not tokens:
        raise GGUFError(f"{header.path}: tokenizer.ggml.tokens is missing: a model without its vocabulary")
    if (longest := max(map(len, tokens))) > MAX_TOKEN_CHARS:
        why = f"has a token of {longest} characters, at most {MAX_TOKEN_CHARS} are allowed"
        raise GGUFError(f"{header.path}: tokenizer.ggml.tokens {why}")
    types = types or [NORMAL] * len(tokens)
    if len(types) != len(tokens):
        counts = f"{len(types)} entries for {len(tokens)} tokens"
        raise GGUFError(f"{header.path}: tokenizer.ggml.token_type has {counts}")
    kind = header.get("tokenizer.ggml.model", TEXT)
    if kind not in ("gpt2", "llama"):
        raise GGUFError(f"{header.path}: tokenizer.ggml.model {kind!r} is not supported, one of gpt2, llama")
    make = _byte_level if kind == "gpt2" else _sentencepiece
    try:
        tokenizer, add_bos = make(header, tokens, types)
        _add_tokens(tokenizer, tokens, types)
        _add_ends(tokenizer, header, tokens, add_bos)
        return tokenizer.to_str().encode()
    except GGUFError:
        raise
    except Exception as error:  # the bindings raise Exception itself
        why = one_line(error, 200)
        raise GGUFError(f"{header.path}: tokenizer.ggml makes no tokenizer: {why}") from None


def _byte_level(header: GGUFHeader, tokens: list[str], types: list[int]) -> tuple[Tokenizer, bool]:
    """Return a byte-level BPE tokenizer, and whether a text begins with BOS if the file does not say."""
    name, merges = header.get("tokenizer.ggml.pre", TEXT), header.get("tokenizer.ggml.merges", TEXTS)
    if name not in RULES:
        raise GGUFError(f"{header.path}: tokenizer.ggml.pre {name!r} is not supported, one of {', '.join(RULES)}")
    if merges is None:
        raise GGUFError(f"{header.path}: tokenizer.ggml.merges is missing")
    rule = RULES[name]
    pairs = [tuple(merge.split(" ", 1)) for merge in merges]
    if broken := next((merge for merge, pair in zip(merges, pairs) if len(pair) != 2), None):
        raise GGUFError(f"{header.path}: tokenizer.ggml.merges: {broken[:40]!r} is not a pair of words")
    vocabulary = {token: token_id for token_id, token in enumerate(tokens)}
    model = models.BPE(vocab=vocabulary, merges=pairs, fuse_unk=False, ignore_merges=rule.whole_words)
    tokenizer = Tokenizer(model)
    if rule.normalizer:
        tokenizer.normalizer = normalizers.NFC()
    splits: list[pre_tokenizers.PreTokenizer] = [
        pre_tokenizers.Split(Regex(expression), behavior="isolated") for expression in rule.splits
    ]
    splits.append(pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(splits)
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer, rule.add_bos


def _sentencepiece(header: GGUFHeader, tokens: list[str], types: list[int]) -> tuple[Tokenizer, bool]:
    scores = header.get("tokenizer.ggml.scores", NUMBERS)
    if scores is None or len(scores) != len(tokens):
        raise GGUFError(f"{header.path}: tokenizer.ggml.scores are missing, or not one a token")
    unknown = next((token for token, kind in zip(tokens, types, strict=True) if kind == UNKNOWN), None)
    vocabulary = {token: token_id for token_id, token in enumerate(tokens)}
    pieces = {token for token, kind in zip(tokens, types, strict=True) if kind in (NORMAL, USER_DEFINED)}
    merges = _merges(vocabulary, scores, pieces)
    tokenizer = Tokenizer(
        models.BPE(vocab=vocabulary, merges=merges, unk_token=unknown, fuse_unk=True, byte_fallback=True)
    )
    prefix = header.get("tokenizer.ggml.add_space_prefix", FLAG, True)
    steps = [normalizers.Replace(" ", SPACE)]
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend(SPACE), *steps] if prefix else steps)
    ends = [decoders.Strip(" ", 1, 0)] if prefix else []
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace(SPACE, " "), decoders.ByteFallback(), decoders.Fuse(), *ends]
    )
    return tokenizer, True


def _merges(vocabulary: dict[str, int], scores: list[float], pieces: set[str]) -> list[tuple[str, str]]:
    """Return every way to join two pieces into a piece, the piece with the best score first."""
    found = []
    for token in pieces:
        for cut in range(1, len(token)):
            left, right = token[:cut], token[cut:]
            if left in vocabulary and right in vocabulary:
                found.append((-scores[vocabulary[token]], vocabulary[left], vocabulary[right], left, right))
    return [(left, right) for *_, left, right in sorted(found)]


def _add_tokens(tokenizer: Tokenizer, tokens: list[str], types: list[int]) -> None:
    """Add control tokens, which have no text, and user-defined ones, which match as a whole. Each kind is added in one
    call, since every call reads the existing tokens."""
    by_kind = [*zip(tokens, types, strict=True)]
    control = [token for token, kind in by_kind if kind in (UNKNOWN, CONTROL)]
    defined = [token for token, kind in by_kind if kind == USER_DEFINED]
    tokenizer.add_special_tokens([AddedToken(token, normalized=False, special=True) for token in control])
    tokenizer.add_tokens([AddedToken(token, normalized=False, special=False) for token in defined])


def _add_ends(tokenizer: Tokenizer, header: GGUFHeader, tokens: list[str], add_bos: bool) -> None:
    """Add the tokens that surround a text."""
    wanted = {"bos": header.get("tokenizer.ggml.add_bos_token", FLAG, add_bos)}
    wanted["eos"] = header.get("tokenizer.ggml.add_eos_token", FLAG, False)
    found = {}
    for name, is_wanted in wanted.items():
        token_id = header.get(f"tokenizer.ggml.{name}_token_id", INTEGER, -1)
        if is_wanted and 0 <= token_id < len(tokens):
            found[name] = (tokens[token_id], token_id)
    if found:
        order = [found[name][0] for name in ("bos",) if name in found] + ["$A"]
        order += [found[name][0] for name in ("eos",) if name in found]
        tokenizer.post_processor = processors.TemplateProcessing(
            single=" ".join(order), special_tokens=list(found.values())
        )
