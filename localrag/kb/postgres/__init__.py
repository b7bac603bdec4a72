"""A knowledge base on a PostgreSQL server with pgvector, with the same guarantees, for several machines."""
