"""Small .gguf files, and their vocabulary from a tokenizer.json."""
