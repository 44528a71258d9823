"""Hold sessions with gateways: commands become events of legs, one table has the transitions, a drain ends the
sessions."""
