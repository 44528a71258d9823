"""Faults and their judgement: stacks behind proxies, loads whose answers are known, and the invariants."""
