"""What a gateway serves: the gRPC services, their ports, and the page for operators."""
