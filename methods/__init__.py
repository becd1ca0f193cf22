"""KV-cache methods, one file (or folder) each. A method knows only `kvbench.method` and `methods.blocks`."""
