"""Layers that a decoder is made of: norm, rope, embedding, activation; linear layers have a folder of their own."""
