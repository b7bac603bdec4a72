"""Text and tokens: counting, markup, reasoning marks, sentences, search terms, sanitising."""
