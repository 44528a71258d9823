"""Scale a running fleet by what its users feel: one decision a minute, from live counters and the model of `baton
plan`."""
