"""Verify proposals, and decide from measured costs and acceptance how many to ask for."""
