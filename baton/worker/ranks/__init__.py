"""Ranks of a worker with KV of their own, on other hosts or on GPUs of this one: where they join, what they give and
take, and the programs that run there."""
