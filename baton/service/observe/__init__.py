"""Telemetry of a process: traces and metrics, phases of a request, and what bounds a run."""
