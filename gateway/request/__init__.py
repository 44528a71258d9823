"""One request as data: checked, as messages for workers, with its stamps and its record."""
