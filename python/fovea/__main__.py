"""python -m fovea: the command line program."""

import signal
import sys

from fovea import _native


def main() -> int:
    # The program computes without coming back to Python, where an interrupt would be noticed.
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    sys.stdout.flush()
    return _native.run_program(sys.argv[1:])


if __name__ == "__main__":
    sys.exit(main())
