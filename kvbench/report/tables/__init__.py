"""Tables of a report, and what they are written as."""
