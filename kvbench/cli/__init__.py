"""The command line: words become checked configs, and configs become jobs."""
