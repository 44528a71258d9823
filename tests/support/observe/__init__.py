"""Look at a stack from outside: traces and metrics received, tables of its processes, access to a worker."""
