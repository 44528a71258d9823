"""One attempt of a request on workers: find them, hold legs on them, and pull, attach to or send what it needs."""
