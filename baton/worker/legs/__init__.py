"""The legs that a worker serves: their states and events, what each has put out, and their index."""
