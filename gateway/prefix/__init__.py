"""Name the spans of a prompt, and look up which worker holds how much of it: in memory or in Redis."""
