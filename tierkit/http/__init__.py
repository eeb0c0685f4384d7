"""HTTP as all services speak it: the server, the client between services, errors and their status codes."""
