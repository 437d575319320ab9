"""Advice on memory: lint findings, remedies, explained out-of-memory errors, and the largest size that fits.

The package `lowtide.memory` exports these functions.
"""
