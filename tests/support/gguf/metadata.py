"""A small .gguf file whose metadata may say anything, written value by value."""

import json
import struct
from pathlib import Path

from tests.support.gateway.small_tokenizers import byte_level, sentencepiece
from tests.support.gguf.vocabulary import CONTROL, NORMAL, token_ids_and_merges

U32, F32, BOOL, STRING, ARRAY, I32, U64, I64, F64 = 4, 6, 7, 8, 9, 5, 10, 11, 12
_SCALARS = {U32: "I", F32: "f", BOOL: "?", I32: "i", U64: "Q", I64: "q", F64: "d"}


class Value:
    """A value of one type; `items`: the type of an array's items."""

    def __init__(self, type_id: int, value, items: int | None = None):
        self.type_id, self.value, self.items = type_id, value, items

    def __repr__(self) -> str:
        return f"Value({self.type_id}, {str(self.value)[:60]}, {self.items})"

    def encoded(self) -> bytes:
        return struct.pack("<I", self.type_id) + self._body(self.type_id, self.value)

    def _body(self, type_id: int, value) -> bytes:
        if type_id == STRING:
            return struct.pack("<Q", len(value.encode())) + value.encode()
        if type_id == ARRAY:
            body = b"".join(self._body(self.items, item) for item in value)
            return struct.pack("<IQ", self.items, len(value)) + body
        return struct.pack("<" + _SCALARS[type_id], value)


def metadata(kind: str = "gpt2") -> dict[str, Value]:
    """Return the metadata of a model whose tensors `write` writes."""
    content = json.loads(byte_level() if kind == "gpt2" else sentencepiece("normalizer"))
    added = {token["content"] for token in content["added_tokens"]}
    token_ids, merges = token_ids_and_merges(content)
    tokens = list(token_ids)
    said = {
        "general.architecture": Value(STRING, "llama"),
        "general.alignment": Value(U32, 32),
        "llama.context_length": Value(U32, 777),
        "llama.embedding_length": Value(U32, 32),
        "llama.feed_forward_length": Value(U32, 64),
        "llama.block_count": Value(U32, 1),
        "llama.attention.head_count": Value(U32, 2),
        "llama.attention.head_count_kv": Value(ARRAY, [2], U32),
        "llama.attention.layer_norm_rms_epsilon": Value(F32, 1e-5),
        "llama.rope.freq_base": Value(F32, 1e4),
        "llama.rope.dimension_count": Value(U32, 16),
        "llama.rope.scaling.type": Value(STRING, "none"),
        "tokenizer.ggml.model": Value(STRING, kind),
        "tokenizer.ggml.tokens": Value(ARRAY, tokens, STRING),
        "tokenizer.ggml.token_type": Value(ARRAY, [CONTROL if t in added else NORMAL for t in tokens], I32),
        "tokenizer.ggml.bos_token_id": Value(U32, token_ids["<s>"]),
        "tokenizer.ggml.eos_token_id": Value(U32, token_ids["</s>"]),
        "tokenizer.ggml.eot_token_id": Value(U32, token_ids["<|eot_id|>"]),
        "tokenizer.ggml.add_bos_token": Value(BOOL, True),
        "tokenizer.chat_template": Value(STRING, "{{ messages }}"),
    }
    if kind == "gpt2":
        said["tokenizer.ggml.pre"] = Value(STRING, "gpt-2")
        said["tokenizer.ggml.merges"] = Value(ARRAY, merges, STRING)
    else:
        said["tokenizer.ggml.scores"] = Value(ARRAY, [0.0] * len(tokens), F32)
        said["tokenizer.ggml.add_space_prefix"] = Value(BOOL, True)
    return said


def write(path: Path, said: dict[str, Value], num_tokens: int = 420) -> Path:
    """Write a file with this metadata, an embedding and a norm of fp32 zeros."""
    tensors = [("token_embd.weight", (32, num_tokens)), ("output_norm.weight", (32,))]
    head = b"GGUF" + struct.pack("<IQQ", 3, len(tensors), len(said))
    for key, value in said.items():
        head += struct.pack("<Q", len(key.encode())) + key.encode() + value.encoded()
    offset = 0
    for name, shape in tensors:
        head += struct.pack("<Q", len(name)) + name.encode() + struct.pack("<I", len(shape))
        head += struct.pack(f"<{len(shape)}Q", *shape) + struct.pack("<IQ", 0, offset)
        offset += 4 * 32 * num_tokens
    path.write_bytes(head + bytes(-len(head) % 32) + bytes(offset + 4 * 32))
    return path
