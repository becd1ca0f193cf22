"""Executors: attention of a selection over a store. All of them agree."""
