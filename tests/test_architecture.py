"""Imports point down between floors, and only the doors know mmengine. Read from the source with ``ast``."""

from __future__ import annotations

import ast
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest

import amp_wrapper

PACKAGE = 'amp_wrapper'
FLOORS = ('words', 'ops', 'owners', 'engine', 'doors')
FLOOR_OF = {
    'errors': 'words',
    'torch_internals': 'words',
    'nested': 'words',
    'policy': 'words',
    'scale_config': 'words',
    'saved_values': 'words',
    'fp32_registry': 'words',
    'cast_rules': 'words',
    'fp32_linalg': 'words',
    'ops': 'ops',
    'fp32_ops': 'ops',
    'fp32_call': 'ops',
    'passes': 'ops',
    'interrupts': 'ops',
    'generators': 'ops',
    'segments': 'ops',
    'op_casts': 'ops',
    'rule_call': 'ops',
    'global_casts': 'ops',
    'averages': 'owners',
    'casting': 'owners',
    'forward_entry': 'owners',
    'forward_hooks': 'owners',
    'module_guard': 'owners',
    'conversion_guard': 'owners',
    'given_weights': 'owners',
    'ownership': 'owners',
    'pass_watch': 'owners',
    'computed_weights': 'owners',
    'quiet_hooks': 'owners',
    'twins': 'owners',
    'split_weights': 'owners',
    'loss_scaler': 'owners',
    'master_weights': 'owners',
    'model_wrappers': 'owners',
    'model_names': 'owners',
    'optim': 'owners',
    'ddp_rebuild': 'owners',
    'accumulation': 'owners',
    'arrival': 'owners',
    'foreign_gradients': 'owners',
    'open_window': 'owners',
    'buffer_snapshots': 'owners',
    'buffer_copies': 'owners',
    'buffer_averages': 'owners',
    'buffer_hooks': 'owners',
    'buffer_users': 'owners',
    'step_flags': 'owners',
    'gradients': 'owners',
    'checkpoint': 'owners',
    'checkpoint_apex': 'owners',
    'checkpoint_file': 'owners',
    'checkpoint_judge': 'owners',
    'checkpoint_schedules': 'owners',
    'checkpoint_transfer': 'owners',
    'convert': 'owners',
    'random_state': 'owners',
    'resume_record': 'owners',
    'scope': 'owners',
    'step_result': 'owners',
    'skip_watch': 'owners',
    'late_read': 'owners',
    'inner_optimizers': 'owners',
    'nonfinite': 'owners',
    'engine': 'engine',
}
# (importer, imported) on one floor; each has its reason
SIBLINGS = {
    ('policy', 'errors'),
    ('policy', 'fp32_registry'),
    ('policy', 'nested'),
    ('policy', 'scale_config'),
    ('scale_config', 'errors'),
    # what a number is
    ('saved_values', 'scale_config'),
    ('fp32_registry', 'nested'),
    # one part of the table
    ('fp32_registry', 'fp32_linalg'),
    ('fp32_ops', 'fp32_call'),
    # what is at work on a thread is asked by all that casts
    ('fp32_ops', 'passes'),
    ('fp32_call', 'passes'),
    ('op_casts', 'passes'),
    ('rule_call', 'passes'),
    ('segments', 'passes'),
    ('passes', 'interrupts'),
    # what was open is opened again, as for segments
    ('generators', 'passes'),
    ('generators', 'fp32_ops'),
    # where checkpointing is handed its segments is a site of the registry
    ('fp32_ops', 'segments'),
    ('global_casts', 'passes'),
    # the user's rule stands above the registry's, at one stand-in
    ('fp32_ops', 'rule_call'),
    ('rule_call', 'fp32_call'),
    # the casts of a model, without the model
    ('global_casts', 'fp32_ops'),
    ('global_casts', 'op_casts'),
    # what is watched is the decision of a step
    ('skip_watch', 'step_result'),
    # hooks and the plan that puts them on are two files of one idea
    ('casting', 'forward_hooks'),
    ('casting', 'module_guard'),
    ('casting', 'computed_weights'),
    ('computed_weights', 'forward_hooks'),
    ('casting', 'quiet_hooks'),
    ('quiet_hooks', 'forward_hooks'),
    ('module_guard', 'forward_hooks'),
    # the plan looks at the weights first, and guards the model last
    ('casting', 'given_weights'),
    ('casting', 'conversion_guard'),
    ('given_weights', 'module_guard'),
    ('conversion_guard', 'twins'),
    # who saves, loads and copies needs no more of a master than its value
    ('casting', 'twins'),
    ('split_weights', 'twins'),
    ('averages', 'casting'),
    ('averages', 'twins'),
    # which side of a pair is newer is told there
    ('master_weights', 'twins'),
    # the hook at the entry of a forward pass
    ('forward_entry', 'averages'),
    ('forward_entry', 'forward_hooks'),
    ('forward_entry', 'master_weights'),
    ('forward_entry', 'twins'),
    # whole files are made of the optimizer parts that checkpoint reads and writes
    ('checkpoint_transfer', 'checkpoint'),
    # building a DDP anew is the one thing done to it, and when is the other
    ('model_wrappers', 'ddp_rebuild'),
    # the hook that notices a DDP is put on and taken off with the others
    ('model_wrappers', 'forward_hooks'),
    # what is kept between passes is unscaled and added up there
    ('arrival', 'gradients'),
    # a window's part of a file is made of gradients and their sums
    ('open_window', 'accumulation'),
    ('open_window', 'step_flags'),
    ('open_window', 'buffer_snapshots'),
    # the hooks tell snapshots of passes, and what is copied how is no matter of when
    ('buffer_snapshots', 'buffer_hooks'),
    ('buffer_snapshots', 'buffer_users'),
    ('buffer_snapshots', 'buffer_copies'),
    # averages of buffers share their fate
    ('buffer_snapshots', 'buffer_averages'),
    ('buffer_averages', 'buffer_copies'),
    ('averages', 'buffer_snapshots'),
    # they are kept out of what torch.compile traces as all others are
    ('buffer_hooks', 'forward_hooks'),
    ('open_window', 'checkpoint'),
    ('resume_record', 'random_state'),
    ('convert', 'checkpoint'),
    # apex's words for the loss scale, which both hand over in ours
    ('checkpoint', 'checkpoint_apex'),
    ('convert', 'checkpoint_apex'),
}
# inside ops/: file to the files beside it that it may import. Nothing imports the front, and what is checked, meant and found
# does not know how it is reached
WITHIN_OPS = {
    'ops': {'checks', 'loader', 'reference', 'reference_step', 'schemas'},
    'ops.schemas': {'reference', 'reference_step'},
    'ops.reference': {'checks'},
    'ops.reference_step': {'checks', 'reference', 'split'},
    'ops.split': set(),
    'ops.checks': set(),
    'ops.loader': set(),
}
FRAMEWORKS = {'mmengine', 'mmcv'}


def floor(module: str) -> str:
    """The floor of a dotted module name inside the package; whatever is not listed is a door."""
    return FLOOR_OF.get(module.split('.')[0], 'doors')


def imports(module: str, source: str, is_package: bool) -> Iterator[str]:
    """Absolute dotted names that ``source`` imports, wherever in the file; ``from x import y`` gives ``x.y``."""
    parts = [PACKAGE, *(part for part in module.split('.') if part)]
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield alias.name
        elif isinstance(node, ast.ImportFrom):
            base = []
            if node.level:
                up = node.level - 1 if is_package else node.level
                base = parts[: len(parts) - up]
            base += node.module.split('.') if node.module else []
            for alias in node.names:
                yield '.'.join([*base, alias.name])


def violations(
    sources: Mapping[str, str], packages: frozenset[str] = frozenset({'', 'engine', 'ops', 'optim'})
) -> list[str]:
    """One line for each import that does not point down, or that knows a framework below the doors."""
    found = []
    for module, source in sources.items():
        mine = floor(module)
        for target in imports(module, source, module in packages):
            parts = target.split('.')
            if parts[0] in FRAMEWORKS and mine != 'doors':
                found.append(f'{module} ({mine}) imports {parts[0]}')
            if parts[0] != PACKAGE or mine == 'doors':
                continue
            if len(parts) == 1:
                found.append(f'{module} ({mine}) imports the package itself')
                continue
            other, there = parts[1], floor(parts[1])
            if FLOORS.index(there) > FLOORS.index(mine):
                found.append(f'{module} ({mine}) imports {other} ({there})')
            elif there == mine and other != module.split('.')[0] and (module, other) not in SIBLINGS:
                found.append(f'{module} ({mine}) imports its sibling {other}')
            elif other == 'ops' and module in WITHIN_OPS:
                inside = parts[2] if len(parts) > 2 and f'ops.{parts[2]}' in WITHIN_OPS else ''
                if inside not in WITHIN_OPS[module]:
                    found.append(f'{module} (ops) imports {f"ops.{inside}" if inside else "their front"}')
    return found


@pytest.fixture(scope='module')
def sources() -> dict[str, str]:
    root = Path(amp_wrapper.__file__).parent
    result = {}
    for path in root.rglob('*.py'):
        parts = list(path.relative_to(root).with_suffix('').parts)
        if parts[-1] == '__init__':
            parts.pop()
        result['.'.join(parts)] = path.read_text(encoding='utf-8')
    return result


def test_every_import_points_down(sources: dict[str, str]) -> None:
    assert violations(sources) == []


def test_every_file_of_the_lower_floors_is_there(sources: dict[str, str]) -> None:
    assert set(FLOOR_OF) <= set(sources)
    assert set(WITHIN_OPS) == {module for module in sources if module.split('.')[0] == 'ops'}


def test_engine_is_read_by_no_lower_floor_and_reads_no_door(sources: dict[str, str]) -> None:
    below = [m for m in sources if floor(m) in FLOORS[:3]]
    assert len(below) >= 10
    for module in below:
        assert not any('.engine' in target for target in imports(module, sources[module], module in ('', 'ops')))


@pytest.mark.parametrize(
    ('module', 'line', 'words'),
    [
        ('casting', 'from .engine import AmpEngine', 'imports engine'),
        ('casting', 'from . import engine', 'imports engine'),
        ('casting', 'from amp_wrapper.engine import AmpEngine', 'imports engine'),
        ('casting', 'import amp_wrapper.optim_wrapper', 'imports optim_wrapper'),
        ('casting', 'from .gradients import GradientClip', 'sibling gradients'),
        ('gradients', 'def f():\n    from .casting import pair', 'sibling casting'),
        ('errors', 'from .policy import Policy', 'sibling policy'),
        ('fp32_ops', 'from . import ops', 'sibling ops'),
        ('ops', 'from ..policy import Policy\nfrom ..engine import Stage', 'imports engine'),
        ('ops.reference', 'from ..casting import pair', 'imports casting'),
        ('ops.reference', 'from . import update_scale', 'imports their front'),
        ('ops.reference', 'from .loader import library', 'imports ops.loader'),
        ('ops.schemas', 'def f():\n    import amp_wrapper.ops', 'imports their front'),
        ('ops.schemas', 'from . import loader', 'imports ops.loader'),
        ('ops.checks', 'from .reference import device_of', 'imports ops.reference'),
        ('ops.loader', 'from . import schemas', 'imports ops.schemas'),
        ('engine', 'from mmengine.optim import OptimWrapper', 'imports mmengine'),
        ('loss_scaler', 'try:\n    import mmcv.ops\nexcept ImportError:\n    pass', 'imports mmcv'),
        ('policy', 'import amp_wrapper', 'the package itself'),
    ],
)
def test_checker_catches_a_planted_violation(sources: dict[str, str], module: str, line: str, words: str) -> None:
    planted = {**sources, module: sources[module] + '\n' + line + '\n'}
    found = violations(planted)
    assert len(found) == 1 and found[0].startswith(module)
    assert words in found[0]


@pytest.mark.parametrize(
    ('module', 'line'),
    [
        ('casting', 'from .nested import cast_tensors\nfrom . import ops, fp32_ops'),
        ('engine', 'from . import casting\nfrom amp_wrapper.policy import Policy'),
        ('ops', 'from .reference import update_scale\nfrom ..errors import nearest'),
        ('hooks', 'import mmengine\nfrom .engine import AmpEngine'),
        ('policy', 'from .errors import nearest\nfrom .nested import CASTABLE'),
    ],
)
def test_checker_allows_what_points_down(sources: dict[str, str], module: str, line: str) -> None:
    assert violations({**sources, module: sources[module] + '\n' + line + '\n'}) == []
