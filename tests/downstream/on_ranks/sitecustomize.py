"""What a machine without a GPU lacks for ``tools/train.py --launcher pytorch``; Python imports this at its start."""

from __future__ import annotations

import atexit
import gc
import sys
from pathlib import Path

sys.path.append(str(Path(__file__).parents[2] / 'support'))

import torch
from torchvision_schemas import declare_torchvision_ops


def end_processes() -> None:
    """gloo's threads abort a process that ends under them, now and then; mmengine leaves them running, wrapped or not."""
    if torch.distributed.is_initialized():
        # DDP in a dead runner holds the group, too
        gc.collect()
        torch.distributed.destroy_process_group()


if not torch.cuda.is_available():
    # mmengine's init_dist calls it whatever the backend is
    torch.cuda.set_device = lambda device: None
    atexit.register(end_processes)
# a CUDA build of torchvision beside a CPU torch cannot be imported otherwise
declare_torchvision_ops()
