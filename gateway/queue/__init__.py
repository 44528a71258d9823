"""Bound what the gateway takes: open requests, quotas of tenants, and the lines in which requests wait."""
