"""Workers that are forked from a process that has read torch."""
