"""kvbench's methods inside vLLM's CPU engine, which schedules and holds the keys and values."""
