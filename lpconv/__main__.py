"""Entry point of the command `lpconv` and of `python -m lpconv`."""

import sys


def main() -> None:
    """Run the command line, or exit with code 4 (unsupported) on Windows, which lacks modules that it imports."""
    if sys.platform == "win32":
        sys.stderr.write("error: Windows lacks fcntl, resource and os.pwrite, which lpconv needs; run it in WSL\n")
        sys.exit(4)
    from lpconv.cli.main import run

    run()


if __name__ == "__main__":
    main()
