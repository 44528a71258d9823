"""Launchers of workers on more than one machine: Ray's nodes, and Kubernetes by its own controllers."""
