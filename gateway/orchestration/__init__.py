"""Carry one request through its workers: its state machine, the table of states, the actions, and retries."""
