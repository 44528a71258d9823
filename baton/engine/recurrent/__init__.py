"""Layers that fold each token into a state of fixed size instead of keeping KV, one token after the other, however a
prompt is divided into chunks."""
