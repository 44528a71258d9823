"""Sessions with gateways: commands become events of keys, one table says what follows, drain ends them."""
