"""Logits to tokens: grammars of constraints, penalties, filters and counter-based noise, on the host or on the
device."""
