"""A training run gives the same bits with the compiled ops and with the reference, and really calls the compiled ones."""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from grid import but, long
from ops_models import bits, in_fresh_process, without_compiled

from amp_wrapper import ops
from amp_wrapper.ops import loader


def counted(calls: Counter[str]) -> Any:
    """Stands for the module of the compiled functions, and counts what is called."""
    module = loader.library().module
    if module is None:
        return None

    def wrap(name: str) -> Any:
        def call(*arguments: Any) -> Any:
            result = getattr(module, name)(*arguments)
            calls[name] += 1
            return result

        return call

    return SimpleNamespace(**{name: wrap(name) for name in vars(module) if not name.startswith('_')})


def train(level: str, device: torch.device) -> dict[str, Any]:
    """Eight updates of two accumulations each, with a clip, an overflow and a growing scale; digests of all that came of it."""
    from toy_engine import Run, poisoned

    from amp_wrapper.engine.clipping import GradientClip

    calls: Counter[str] = Counter()
    found = loader.library()
    replaced = loader.Library(counted(calls), found.devices, found.reason, found.chosen, found.facts)
    loader.library = lambda: replaced  # type: ignore[assignment]
    scale = dict(init_scale=2.0**10, growth_interval=2) if level == 'O2' else None
    run = Run(level, device, **({'loss_scale': scale} if scale else {}))
    total, trace = hashlib.sha256(), []
    for step in range(8):
        for index in (2 * step, 2 * step + 1):
            # bfloat16 has no loss scale, and nothing is skipped
            if level == 'O2' and step == 3 and index % 2:
                with poisoned(run.parameter('fc.weight')):
                    run.backward(index)
            else:
                run.backward(index)
        result = run.engine.step(GradientClip.parse(dict(max_norm=0.05)))
        run.engine.zero_grad()
        trace.append([bool(result.skipped), repr(result)])
        for name, tensor in sorted(run.bits().items()):
            total.update(name.encode() + bits(tensor).numpy().tobytes())
    return dict(
        backend=ops.backend_of(device),
        digest=total.hexdigest(),
        trace=trace,
        calls=calls,
        scale=str(run.engine.state_dict()),
    )


@pytest.mark.parametrize('level', but(['O2'], ['O2', 'O5'], long))
def test_the_reference_trains_to_the_same_bits(level: str, device: torch.device) -> None:
    if without_compiled(device):
        pytest.skip(without_compiled(device))
    arguments = (str(Path(__file__)), level, str(device))
    compiled = in_fresh_process(*arguments)
    reference = in_fresh_process(*arguments, environment={'AMP_WRAPPER_OPS': 'reference'})
    assert (compiled.pop('backend'), reference.pop('backend')) == (f'{device.type.upper()} op', 'reference')
    calls = compiled.pop('calls')
    assert calls['multi_tensor_scale'] >= 8 and calls['multi_tensor_copy'] >= 7
    assert level != 'O2' or calls['update_scale'] == 8
    assert reference.pop('calls') == {}
    skipped = [row[0] for row in compiled['trace']]
    assert skipped == [level == 'O2' and step == 3 for step in range(8)]
    assert compiled == reference


if __name__ == '__main__':
    import sys

    assert isinstance(loader, ModuleType)
    print(json.dumps(train(sys.argv[1], torch.device(sys.argv[2]))))
