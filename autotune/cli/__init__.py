"""The command line: it parses, calls the rooms below and prints. See `autotune.cli.main`."""
