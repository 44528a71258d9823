"""Decide which calls are allowed: certificates by role, credentials, call slots, and what is open beyond this host."""
