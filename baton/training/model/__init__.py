"""The trained model: a Llama in plain torch, its trainer, evaluation and export."""
