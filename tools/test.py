"""Test a checkpoint: ``amp-wrapper test``, for use in a checkout; the configs here import examples/."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from amp_wrapper.cli import main

if __name__ == '__main__':
    sys.exit(main(['test', *sys.argv[1:]]))
