"""What another process says: ``worker.py FOLDER`` prints warnings without a library, and digests of results, as JSON."""

from __future__ import annotations

import contextlib
import json
import os
import sys
import warnings
from pathlib import Path

import torch
from test_steps import digests
from torch._subclasses.fake_tensor import FakeTensorMode

from amp_wrapper import ops


def warn(setting: str, target: Path) -> None:
    """Use ops with a setting, and write the warnings and a result."""
    os.environ['AMP_WRAPPER_OPS'] = setting
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter('always')
        for _ in range(3):
            targets = [torch.zeros(2)]
            ops.multi_tensor_scale([torch.ones(2)], targets, torch.tensor(3.0), torch.tensor(0.0))
            ops.multi_tensor_l2norm(targets)
    said = [str(one.message) for one in caught if 'compiled ops' in str(one.message)]
    target.write_text(json.dumps([said, targets[0].tolist()]))


def warn_of_gpus(target: Path) -> None:
    """Use a library that serves the CPU alone on fake tensors of a GPU, and write the warnings and the backends."""
    with FakeTensorMode(), warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter('always')
        for _ in range(2):
            tensors = [torch.ones(3, device='cuda')]
            ops.multi_tensor_scale(tensors, tensors, torch.ones((), device='cuda'))
    texts = [ops.backend()]
    torch.cuda.is_available = lambda: True
    texts.append(ops.backend())
    target.write_text(json.dumps([[str(one.message) for one in caught if 'compiled ops' in str(one.message)], texts]))


def main() -> None:
    """The command."""
    folder = Path(sys.argv[1])
    (folder / 'empty').mkdir()
    (folder / 'chosen').mkdir()
    record = dict(built=False, reason='AMP_WRAPPER_WITH_OPS=0 was set', chosen=True)
    (folder / 'chosen' / '_build.json').write_text(json.dumps(record), encoding='utf-8')
    said = []
    for setting in (str(folder / 'empty'), str(folder / 'chosen'), 'reference'):
        # no library was looked for in this process yet
        if not os.fork():
            warn(setting, folder / 'said')
            os._exit(0)
        assert os.wait()[1] == 0
        said.append(json.loads((folder / 'said').read_text()))
    if torch.version.cuda is None and ops.compiled_devices():
        # a torch with CUDA would look for a driver
        if not os.fork():
            warn_of_gpus(folder / 'said')
            os._exit(0)
        assert os.wait()[1] == 0
        said.append(json.loads((folder / 'said').read_text()))
    if not os.fork():
        with contextlib.suppress(TypeError, UnicodeError):
            ops.multi_tensor_copy([], [], **{'\ud800': 1})
        os._exit(0)
    ended = os.wait()[1]
    found = dict(ended=ended, capability=torch.backends.cpu.get_cpu_capability(), said=said)
    found['digests'] = digests(torch.device('cpu')) if ops.compiled_devices() else []
    print(json.dumps(found))


if __name__ == '__main__':
    main()
