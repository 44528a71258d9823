"""What both roles share: a process with an engine, sessions with gateways, KV in and out, and the state machine of
legs."""
