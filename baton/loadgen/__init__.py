"""A load that people trust: traces, arrivals, sender processes, summaries, the report."""
