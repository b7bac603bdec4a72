"""A knowledge base on a PostgreSQL server with pgvector: the same promises, for more machines than one."""
