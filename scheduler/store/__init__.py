"""Jobs, tasks and results in a database, through SQLAlchemy; nothing in here is special to SQLite but its pragmas."""
