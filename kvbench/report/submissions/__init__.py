"""Runs of others for a board: what is packed into a submission, and what a submission must satisfy
to give rows.
"""
