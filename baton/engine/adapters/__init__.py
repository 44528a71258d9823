"""LoRA adapters: read as PEFT stores them, held by identity, added to the rows of requests that name them."""
