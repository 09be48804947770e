"""The operator's HTTP endpoints; they read, nothing here decides."""
