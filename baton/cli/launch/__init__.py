"""Start a stack as child processes of this one, deal GPUs and cores out to them, and keep them running."""
