"""Families whose layers have one MLP each."""
