"""Compiled code: vectors, stored rows, attention, a model's layers, threads.

No model and no method is known here.
"""
