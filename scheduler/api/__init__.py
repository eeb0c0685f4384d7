"""The HTTP API: thin routes, and the JSON that they take and give."""
