"""The steps of `baton doctor --gpu`, a module with a `check` each."""
