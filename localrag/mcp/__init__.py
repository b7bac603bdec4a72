"""A server of the Model Context Protocol over standard input and output: `ask` and its parts as tools. Needs the extra `mcp`."""
