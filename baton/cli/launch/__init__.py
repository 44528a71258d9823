"""Start a stack: gateways here, workers where a launcher places them, and a port where operators scale it, noted for
those on this machine."""
