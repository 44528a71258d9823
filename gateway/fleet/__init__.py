"""The workers that serve now, and which of them routing may choose from."""
