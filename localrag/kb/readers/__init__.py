"""Files to text, a format a file."""
