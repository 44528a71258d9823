"""LoRA adapters: read as PEFT stores them, held by identity, applied to the rows of requests that name them."""
