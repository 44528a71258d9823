"""Workers and gateways that are forked from a process that has imported what they import."""
