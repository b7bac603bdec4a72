"""Answers from your own documents with local GGUF models: every token counted, fitted and accounted for."""
