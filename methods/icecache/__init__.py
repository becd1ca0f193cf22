"""IceCache: semantic pages found by a DCI tree (ICLR 2026)."""
