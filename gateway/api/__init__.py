"""Serve the gRPC services on their ports, and the page for operators."""
