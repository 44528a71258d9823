"""One request as data: checked, in the words of workers, with its stamps and its record."""
