"""The page on the fleet: a shell that the server renders, and modules that fill it by the public API alone."""
