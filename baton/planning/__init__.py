"""Plan before buying: the memory and the step times of a model on a device, and a stack of it that serves a load in
virtual time."""
