"""The legs of requests that a worker serves: one table of states, what each has put out, and their index by key."""
