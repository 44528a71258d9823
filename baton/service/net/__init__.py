"""gRPC servers, channels to them, the admin pages over HTTP, and the health probe."""
