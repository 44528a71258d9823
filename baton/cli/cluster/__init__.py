"""Commands that run, check, watch and drain a cluster: up, config, certs, doctor, top, drain; and the demo."""
