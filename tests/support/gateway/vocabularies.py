"""Vocabularies as a tokenizer.json, made and not trained."""

from collections.abc import Iterable

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

WORDS = ("the", "true", "false", "null", '":', '",', "{}", "[]", "12", "hello")


END = "<|end|>"


def byte_vocabulary(without: str = "", words: Iterable[str] = WORDS, only: str = "") -> bytes:
    """Return a vocabulary: a token for each byte, but those of `without`, or for those of `only`; some words; and END,
    the last id."""
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    if only:
        alphabet = set(pre_tokenizers.ByteLevel(False, use_regex=False).pre_tokenize_str(only)[0][0])
    vocabulary = {symbol: token_id for token_id, symbol in enumerate(sorted(set(alphabet) - set(without)))}
    merges = []
    for word in words:
        if set(word) <= set(vocabulary):
            for length in range(2, len(word) + 1):
                if word[:length] not in vocabulary:
                    vocabulary[word[:length]] = len(vocabulary)
                    merges.append((word[: length - 1], word[length - 1]))
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=merges))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(END, special=True)])
    return tokenizer.to_str().encode()
