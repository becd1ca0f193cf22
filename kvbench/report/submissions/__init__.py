"""Runs of others for a board: how they are packed, and what they must satisfy."""
