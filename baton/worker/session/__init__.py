"""Sessions with gateways: commands become events of their keys; drain ends them."""
