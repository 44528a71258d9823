"""What launchers are tested with: the suite of all, small programs in place of workers, a Ray cluster, an API server of
Kubernetes."""
