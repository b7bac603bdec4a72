"""What is asked of all programs, one file a question. Each has `measure`, which gives a row for each program that it was given."""
