"""Choose workers: a pure function of matches, loads and measured latencies."""
