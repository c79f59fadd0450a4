"""The command line: ``python -m meshmuon <command>``."""
