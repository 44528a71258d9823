"""Sessions with gateways: commands become events of legs, one table says what follows, drain ends them."""
