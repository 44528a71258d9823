"""Bound what the gateway takes: open requests, quotas of tenants, and the queues in which requests wait."""
