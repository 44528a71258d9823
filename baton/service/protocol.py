"""What gateways, workers and operators' commands must agree on, beside the .proto files."""

PROTOCOL = 1  # the one version that this build speaks
INSTANCE_BYTES = 16  # of the random name that a process has for one start
ROLES = ("prefill", "decode")  # of workers
