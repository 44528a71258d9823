"""Make an object a process: settings, errors, logs and clocks."""

import os

# gRPC's library writes an error to stderr for each connection or call that it refuses, so any caller that reaches a
# port could fill the log. The library reads this variable when it is imported.
os.environ.setdefault("GRPC_VERBOSITY", "NONE")
