"""The HTTP API: thin routes, one subject a file."""
