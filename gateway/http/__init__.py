"""Serve OpenAI's and Anthropic's HTTP APIs: a translation in front of the handler that serves the gRPC calls."""
