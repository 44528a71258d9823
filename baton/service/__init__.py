"""Make an object a process: settings, errors, logs and clocks."""

import os

# For each connection or call that it refuses gRPC's library writes an error to stderr: any caller that reaches a port
# could fill the log. It reads this when it is imported.
os.environ.setdefault("GRPC_VERBOSITY", "NONE")
