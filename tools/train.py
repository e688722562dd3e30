"""Train a model from an mmengine config: ``amp-wrapper train``, for use in a checkout; the configs here import examples/."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from amp_wrapper.cli import main

if __name__ == '__main__':
    sys.exit(main(['train', *sys.argv[1:]]))
