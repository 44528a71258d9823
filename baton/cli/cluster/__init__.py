"""Commands that run, check, watch, scale and drain a cluster: up, config, certs, doctor, top, scale, drain; and the
demo."""
