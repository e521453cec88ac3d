"""`python -m lpconv` is `lpconv`."""

from lpconv.cli.main import run

run()
