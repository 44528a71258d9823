"""OpenAI's chat, completions, embeddings and ranks: bodies of requests, and answers."""
