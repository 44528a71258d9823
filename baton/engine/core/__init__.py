"""The engine's words: requests, batches, configuration, devices, and what a model says of itself."""
