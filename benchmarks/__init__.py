"""Benchmarks that compare localrag with other programs in the same run. They are not tests."""
