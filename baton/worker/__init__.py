"""The chassis of both roles: a process with an engine, sessions with gateways, KV in and out, and the machine of
legs."""
