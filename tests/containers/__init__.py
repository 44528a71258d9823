"""Images built and the compose stack run by a real container engine, without an image registry: `make test-compose`."""
