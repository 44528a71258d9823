"""Commands that run, check, watch and drain a cluster: up, certs, doctor, top, drain; and the demo."""
