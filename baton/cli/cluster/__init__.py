"""Commands that plan, run, check, watch and drain a cluster: up, config, certs, plan, doctor, top, drain; and the demo."""
