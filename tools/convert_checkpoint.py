"""Look into a checkpoint, or turn it into weights or a file for mmengine: ``amp-wrapper convert``, for use in a checkout."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from amp_wrapper.cli import script

if __name__ == '__main__':
    sys.exit(script(__file__))
