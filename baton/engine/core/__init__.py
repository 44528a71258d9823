"""The engine's words: requests, batches, configuration, devices, cores shared with other workers, and what a model says
of itself."""
