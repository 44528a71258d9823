"""What goes out on a connection: JSON, the events of a stream, and errors with their statuses."""
