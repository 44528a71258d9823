"""Serve OpenAI's HTTP API: a translation in front of the handler that serves the gRPC calls."""
