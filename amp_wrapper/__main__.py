"""``python -m amp_wrapper`` is the command ``amp-wrapper``."""

import sys

from .cli import main

# worker processes import this file under another name
if __name__ == '__main__':
    sys.exit(main())
