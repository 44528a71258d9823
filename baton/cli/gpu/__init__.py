"""Check a GPU host in nine steps, each in a process of its own: `baton doctor --gpu`."""
