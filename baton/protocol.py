"""Define what gateways, workers and operators' commands must agree on, beside the .proto files. Plain Python."""

PROTOCOL = 1  # the one version that this build speaks
INSTANCE_BYTES = 16  # of the random name that a process has for one start
ROLES = ("prefill", "decode")  # of workers
HOLDERS = ("quarantined", "fetching", "leased", "running", "cached", "free")  # of KV blocks, strongest first
MAX_DRAFT_TOKENS = 16  # proposals that a sequence may have in one step
