"""`python -m tests.harness.script FILE`: a script as the main module, in a fork of the server that has the imports."""

import runpy
import sys

if __name__ == "__main__":
    runpy.run_path(sys.argv[1], run_name="__main__")
