"""Care of a database: checks, backups, and what becomes of what is old."""
