"""Small tokenizers of the two kinds that the families use: byte-level and sentencepiece-like."""

import functools
import json

from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers

TEXTS = ["The quick brown fox jumps over the lazy dog. Größe, façade, naïve, 東京, Здравствуйте, 🙂. " * 8]
CONTROLS = (
    *("<s>", "</s>", "<|endoftext|>", "<|begin_of_text|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>"),
    *("<|im_start|>", "<|im_end|>", "<|user|>", "<|assistant|>", "<|system|>", "<|end|>"),
)


@functools.cache
def byte_level(bos: str | None = None, unspecial: tuple[str, ...] = ()) -> bytes:
    """Return a tokenizer.json as Llama 3 and Qwen have it; `bos` is put before texts. `unspecial` are added, and not
    special."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=420,
        special_tokens=list(CONTROLS),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(TEXTS, trainer)
    tokenizer.add_tokens([AddedToken(token, special=False) for token in unspecial])
    if bos:
        bos_id = tokenizer.token_to_id(bos)
        tokenizer.post_processor = processors.TemplateProcessing(single=f"{bos} $A", special_tokens=[(bos, bos_id)])
    return tokenizer.to_str().encode()


@functools.cache
def sentencepiece(prepend: str = "always", strips_space: bool = True, added: tuple[str, ...] = ()) -> bytes:
    """Return a tokenizer.json as Llama 2 ("normalizer") and Mistral ("first") have it: spaces are ▁, unknown characters
    are bytes. Gemma's keeps the space in front; `added` are words of the vocabulary."""
    vocab = {"<unk>": 0, "<s>": 1, "</s>": 2} | {f"<0x{value:02X}>": value + 3 for value in range(256)}
    letters = sorted(character for character in {*TEXTS[0], *"[]/<>|_\n"} if character.isascii() and character != " ")
    for character in ["▁", *letters]:
        vocab[character] = len(vocab)
    merges = [("▁", "t"), ("▁", "T"), ("h", "e"), ("▁t", "he"), ("▁T", "he"), ("o", "x"), ("▁", "h")]
    for left, right in merges:
        vocab[left + right] = len(vocab)
    for token in added:
        vocab.setdefault(token, len(vocab))
    tokenizer = Tokenizer(models.BPE(vocab, merges, unk_token="<unk>", fuse_unk=True, byte_fallback=True))
    if prepend == "normalizer":
        tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    else:
        tokenizer.pre_tokenizer = pre_tokenizers.Metaspace("▁", prepend_scheme=prepend, split=False)
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    tokenizer.decoder = decoders.Sequence([*steps, decoders.Strip(" ", 1, 0)] if strips_space else steps)
    tokenizer.add_special_tokens(["<unk>", *CONTROLS])
    tokenizer.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
    return tokenizer.to_str().encode()


def special(tokenizer_json: bytes) -> dict[str, int]:
    return {token["content"]: token["id"] for token in json.loads(tokenizer_json)["added_tokens"]}
