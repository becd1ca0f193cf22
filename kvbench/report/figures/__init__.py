"""Pictures of a report, each in the file that bears its name."""
