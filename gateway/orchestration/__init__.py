"""Carry one request through its workers: a table of states, attempts, and what follows from failures."""
