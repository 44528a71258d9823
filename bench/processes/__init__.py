"""What benches start beside themselves: clients, stubs, sources and receivers."""
