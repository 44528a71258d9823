"""Logits to tokens: penalties, filters and counter-based noise, on the host or on the device."""
