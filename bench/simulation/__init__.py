"""Fleets that are served in simulated time."""
