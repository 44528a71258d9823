"""Makes quantized model folders, and measures what that costs."""
