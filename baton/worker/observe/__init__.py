"""Report a worker: metrics, spans, the device's roofline, sizes of its tables."""
