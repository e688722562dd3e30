"""One of two ranks: trains in one go, then again with a signal to rank 1 alone, then goes on. Started by torchrun."""

from __future__ import annotations

import gc
import os
import sys
from pathlib import Path
from typing import Any

os.environ.setdefault('OMP_NUM_THREADS', '1')
import mmengine.runner.runner
import torch
import torch.distributed as dist
import toy
from preemption import PREEMPTION, with_hooks

mmengine.runner.runner.collect_env = dict


def train(folder: Path, case: dict[str, Any], **more: Any) -> None:
    # each rank draws its own numbers, as dropout does on different data
    case = dict(
        case,
        launcher='pytorch',
        model_wrapper_cfg=dict(type='MMDistributedDataParallel', device_ids=None, broadcast_buffers=False),
        randomness=dict(seed=0, deterministic=True, diff_rank_seed=True),
        **more,
    )
    toy.run(folder, **case)


def main(folder: Path) -> None:
    torch.set_num_threads(1)
    # mmengine sets a CUDA device when it starts processes
    dist.init_process_group('gloo')
    case = toy.everything('O5', max_epochs=2)
    train(folder / 'whole', case)
    hooks = (PREEMPTION, dict(type='SendSignal', iteration=4, rank=1))
    try:
        train(folder / 'part', with_hooks(case, *hooks))
    except SystemExit as ended:
        if ended.code != 0:
            raise
    else:
        raise RuntimeError('the signal was lost')
    if dist.get_rank() == 0:
        saved = toy.checkpoint(folder / 'part', 'preempted.pth')['meta']['iter']
        (folder / 'saved').write_text(str(saved))
    dist.barrier()
    train(folder / 'part', case, resume=True)
    dist.barrier()
    # models that wait for the collector hold gloo's threads, which abort a process that ends under them
    gc.collect()
    dist.destroy_process_group()


if __name__ == '__main__':
    main(Path(sys.argv[1]))
