"""Decides which execution to measure next, and which of the measured ones wins: pure Python, without a clock."""
