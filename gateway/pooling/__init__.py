"""Prompts that are read and not answered, for embeddings and scores: what a prefill worker makes of each."""
