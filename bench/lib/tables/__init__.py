"""Tables of the docs from recorded runs, if their rows alone would be hard to read."""
