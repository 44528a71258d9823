"""Attention over paged KV: one interface, its backends, and the choice among them."""
