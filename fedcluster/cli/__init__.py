"""The command line: one file for each group of commands."""

from fedcluster.cli.main import main as main
