"""The command line: one file per subcommand; most are rules of the workflow."""
