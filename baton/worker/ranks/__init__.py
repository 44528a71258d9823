"""Ranks of a worker with KV pools of their own, on other hosts or on GPUs of this one: how they join, give and take KV,
and the programs that run them."""
