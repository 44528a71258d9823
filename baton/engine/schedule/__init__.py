"""Decide what the next step computes: admission, live groups and sequences, chunked prefill and decode."""
