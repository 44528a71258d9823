"""The path of a request from a client's call to workers and back. It runs on CPUs, without torch."""
