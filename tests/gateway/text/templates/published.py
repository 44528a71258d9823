"""Published chat templates, here and as transformers has them."""

from pathlib import Path

import tokenizers
import transformers

from gateway.text.templates import ChatTemplate

FOLDER = Path(__file__).parent
TEMPLATES = {path.stem: path.read_text() for path in sorted(FOLDER.glob("*.jinja"))}
SPECIAL = {
    "llama-3": {"bos_token": "<|begin_of_text|>", "eos_token": "<|eot_id|>"},
    "qwen-chatml": {"eos_token": "<|im_end|>"},
    "mistral": {"bos_token": "<s>", "eos_token": "</s>"},
    "llama-2": {"bos_token": "<s>", "eos_token": "</s>"},
    "zephyr": {"bos_token": "<s>", "eos_token": "</s>"},
}


def reference(name: str, tokenizer_json: bytes):
    """Return transformers' tokenizer with this template."""
    tokenizer = tokenizers.Tokenizer.from_buffer(tokenizer_json)
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, chat_template=TEMPLATES[name], **SPECIAL[name]
    )


def chat_template(name: str) -> ChatTemplate:
    return ChatTemplate(TEMPLATES[name], SPECIAL[name])
