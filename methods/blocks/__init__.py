"""Building blocks that several methods share."""
