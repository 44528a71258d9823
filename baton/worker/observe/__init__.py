"""What a worker reports: metrics, spans, the device's roofline, sizes of its tables."""
