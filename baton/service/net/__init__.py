"""gRPC servers, channels to them, HTTP servers, the admin pages, and the health probe."""
