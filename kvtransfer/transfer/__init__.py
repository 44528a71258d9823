"""Run both ends of a transfer: the source that leases and serves, the fetcher that pulls and verifies."""
