"""Makes the demo model: corpus, tokenizer, target, draft, export, evaluation."""
