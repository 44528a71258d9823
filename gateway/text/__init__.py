"""Text to token ids and back, and chat templates: bounded, in threads that tenants share by turns."""
