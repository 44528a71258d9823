"""Read a model folder or .gguf file: names, limits, chat template and tokenizer, never weights."""
