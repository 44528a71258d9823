"""The prefill role: read a prompt for a taker, let it follow the computation, hold the KV until it is taken."""
