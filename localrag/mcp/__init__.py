"""A Model Context Protocol (MCP) server over standard input and output, with `ask` and its parts as tools. Needs the extra `mcp`."""
