"""The command line and its reports: parse, call, show."""
