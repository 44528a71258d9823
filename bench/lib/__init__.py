"""Share code among benches: reports, the machine's limits, tables for the docs, and running a bench by its path."""
