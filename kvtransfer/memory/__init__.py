"""View pools as bytes: find the bytes of a range, copy, convert and digest them."""
