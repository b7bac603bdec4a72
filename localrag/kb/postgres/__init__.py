"""Knowledge bases on a PostgreSQL server with pgvector, shared by several machines, with the same guarantees as local ones."""
