"""Settings of a gateway, among them the served model, service levels and networks."""
