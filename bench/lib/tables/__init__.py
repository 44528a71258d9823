"""Tables of the docs from recorded runs, where rows alone would not be read."""
