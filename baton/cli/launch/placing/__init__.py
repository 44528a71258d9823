"""The seam between a stack and what places its workers, and its form for this machine: child processes, kept running.
Read launcher first."""
