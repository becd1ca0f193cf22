"""Reports: run folders and published tables become data frames (`data`), and those tables, figures,
claims and sites.

`kvbench report` is the way in. Nothing here runs a model, and importing a module of it imports no
torch.
"""
