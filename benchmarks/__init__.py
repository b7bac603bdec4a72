"""Measurements, side by side in one run. None of them is a test."""
