"""Layers that fold each token into a state of fixed size, in place of KV: one token after the other, whatever the
chunks."""
