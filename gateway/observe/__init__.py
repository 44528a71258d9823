"""Report requests: metrics, spans, access log, and the list of recent ones."""
