"""What another process says: ``worker.py`` prints its instruction set and digests of results, as JSON."""

from __future__ import annotations

import json

import torch
from test_steps import digests

from amp_wrapper import ops


def main() -> None:
    """The command."""
    found = digests(torch.device('cpu')) if ops.serves('cpu') else []
    print(json.dumps(dict(capability=torch.backends.cpu.get_cpu_capability(), digests=found)))


if __name__ == '__main__':
    main()
