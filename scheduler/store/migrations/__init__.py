"""Steps from one form of the tables to the next, by Alembic; a new step is a new file in `versions`."""
