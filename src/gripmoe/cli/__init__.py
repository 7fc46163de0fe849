"""The command line: one file per subcommand, one subcommand per rule of the workflow."""
