"""Attacks on ports as data, the attacker in a process of its own, and the stack that is attacked."""
