"""The papers' claims as criteria over runs, files and printed numbers, and their verdicts."""
