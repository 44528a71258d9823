"""The models that are served: find them by name, and add, replace and remove them at run time."""
