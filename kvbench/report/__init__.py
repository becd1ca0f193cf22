"""Reports: run folders and published tables as data, tables, figures, claims and sites.

`kvbench report` is the way in. Nothing here runs a model, and importing a module of it imports no
torch.
"""

LISTING = "kvbench report --list names"  # where a message does not name all
