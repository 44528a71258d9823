"""Pools as bytes: which of them a range has, and how they are copied, converted and digested."""
