"""Read prompts that need no answer, for embeddings and scores: a prefill worker returns a vector for each."""
