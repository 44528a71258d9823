"""Speculative decoding: proposers of tokens, and the control that verifies and paces them."""
