"""Processes that benches start: clients, stubs, sources and receivers."""
