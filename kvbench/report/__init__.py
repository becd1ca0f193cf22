"""Reports: run folders and published tables become one data frame, and that becomes tables and figures.

`kvbench report` is the way in. Nothing here runs a model, and importing a module of it imports no torch.
"""
