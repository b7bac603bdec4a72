"""The HTTP API: OpenAI-compatible answers from indexes, and routes to manage the indexes. Needs the extra `server`."""
