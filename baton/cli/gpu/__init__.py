"""Check a GPU host in eight steps, each in a process of its own: `baton doctor --gpu`."""
