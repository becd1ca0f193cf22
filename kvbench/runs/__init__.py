"""Runs: samples through arms into run folders, and what their summaries hold."""
