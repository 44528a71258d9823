"""Processes that benches start beside themselves: clients, stubs, sources and receivers."""
