"""Find the vocabulary of a model, as a tokenizer.json: that of a folder, or what a .gguf file says of it."""
