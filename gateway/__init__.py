"""The path of a request: from a client's call to workers and back. CPU only, without torch."""
