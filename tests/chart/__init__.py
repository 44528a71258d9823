"""deploy/helm, rendered by helm itself: valid objects, real flags, and parts that fit together."""
