"""Entry point of `python -m lpconv`."""

from lpconv.cli.main import run

run()
