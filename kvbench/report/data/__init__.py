"""Run folders and printed numbers as data: frames, selections, intervals."""
