"""Find workers: by addresses in the settings, DNS names, registration and Redis."""
