"""The legs that a worker serves: their states and events, the tokens that they have put out, and their index."""
