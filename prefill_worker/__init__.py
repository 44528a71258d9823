"""The prefill role: the defaults of a worker that reads prompts, and its `__main__`."""
