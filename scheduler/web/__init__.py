"""The page: a shell that the server renders, and modules that fill it through the public API."""
