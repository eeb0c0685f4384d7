"""End and edge node compared with a cascade of two plain FastAPI services."""
