"""kvbench's methods inside vLLM's CPU engine, which batches, schedules and holds the keys and
values.
"""
