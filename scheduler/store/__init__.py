"""Jobs, tasks and results in a database, through SQLAlchemy; only the pragmas are specific to SQLite."""
