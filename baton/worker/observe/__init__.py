"""Report a worker: metrics, spans, the device's roofline, and the sizes of its tables."""
