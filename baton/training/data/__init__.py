"""The corpus, its tokenizer, batches of token ids, and files written whole."""
