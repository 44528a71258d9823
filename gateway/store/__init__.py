"""Reach Redis within bounds of time and bytes, and stop asking while it does not answer."""
