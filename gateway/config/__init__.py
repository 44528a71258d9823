"""Settings of a gateway, and what they say of the served model, service levels and networks."""
