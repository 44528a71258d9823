"""The models that are served: found by the name that a request gives, added, replaced and removed while others run."""
