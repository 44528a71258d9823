"""The decode role: the defaults of a worker that writes answers, and its `__main__`."""
