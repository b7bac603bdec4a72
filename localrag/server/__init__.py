"""The HTTP API: the walk of `ask` for other programs, and the routes of a RAG engine. Needs the extra `server`."""
