"""Carry one request through its workers: the state machine, its table, the actions of the table, failed attempts."""
