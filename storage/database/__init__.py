"""The database itself: engines, transactions, column types, the schema's version."""
