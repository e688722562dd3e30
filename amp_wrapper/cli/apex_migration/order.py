"""DistributedDataParallel and amp.initialize: the cast changes what DDP holds on to, so it comes first."""

from __future__ import annotations

import libcst as cst

from .arguments import Arguments
from .calls import INITIALIZE
from .source import Source


def decide(source: Source) -> None:
    """List each DistributedDataParallel that stands before amp.initialize in the same function."""
    wrapped, initialized = [], []
    for use in source.uses:
        call = source.call_of(use)
        if call is None or not call.args:
            continue
        if use.dotted.endswith('.DistributedDataParallel'):
            wrapped.append(call)
        elif use.dotted.endswith('.initialize'):
            initialized.append(call)
    for call in wrapped:
        names = {source.code(call.args[0].value), *_targets(source, call)}
        for later in initialized:
            models = Arguments(later, INITIALIZE).values.get('models')
            if models is None or source.function(later) is not source.function(call):
                continue
            parts = models.elements if isinstance(models, (cst.List, cst.Tuple)) else ()
            given = {source.code(models), *(source.code(part.value) for part in parts)}
            if source.start(call) < source.start(later) and _targets(source, call) & given and names & given:
                source.hand(
                    call,
                    'DistributedDataParallel',
                    f'wraps the model before amp.initialize in line {source.line(later)}, which refuses it: move it below',
                )


def _targets(source: Source, call: cst.Call) -> set[str]:
    statement = source.parents.get(call)
    if not isinstance(statement, cst.Assign):
        return set()
    return {source.code(target.target) for target in statement.targets}
