"""Folders of small models: random, learned, quantized as their publishers do, with adapters or a draft."""
