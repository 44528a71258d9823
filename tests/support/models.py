"""Small random models for tests: a Llama with a tokenizer of its own, made in a second, as a Hugging Face folder."""

import functools
import pathlib
from pathlib import Path

import torch
from tokenizers import Tokenizer

from baton.training.data.tokenizer import train_tokenizer
from baton.training.model.export import export
from baton.training.model.llama import Llama, ModelConfig

TINY = ModelConfig(1024, 64, 128, num_layers=2, num_heads=4, num_kv_heads=2, head_dim=16, max_length=1024)
EOS_IDS = (0, 4)  # <|endoftext|>, <|end|>: as generation_config.json has it


def make_model(folder: Path, config: ModelConfig = TINY, seed: int = 0) -> Path:
    """Write a random model to `folder` and return it. Weights are drawn wide, so that its tokens vary."""
    torch.manual_seed(seed)
    model = Llama(config)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() == 2:
                parameter.normal_(std=2.0 / parameter.shape[1] ** 0.5)
    export(model, _tokenizer(config.vocab_size), folder)
    return folder


@functools.cache
def _tokenizer(vocab_size: int) -> Tokenizer:
    return train_tokenizer([Path(pathlib.__file__).read_text(), *SENTENCES], vocab_size)


SENTENCES = ("The quick brown fox jumps over the lazy dog. ", "Größe, façade, naïve, 東京, Здравствуйте, 🙂. ") * 4
