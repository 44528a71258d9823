"""Find workers: addresses from settings, DNS names, registration and Redis."""
