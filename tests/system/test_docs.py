"""The pages are true: snippets run, tables agree with the code, links and paths exist, docstring examples pass."""

from __future__ import annotations

import argparse
import ast
import doctest
import importlib
import inspect
import pkgutil
import re
import shlex
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from fsdp import skip_without_fsdp
from mmengine.config import Config
from mmengine.logging import MMLogger
from mmengine.optim import OptimWrapper, build_optim_wrapper
from mmengine.registry import HOOKS
from snippets import (
    FENCE,
    PAGES,
    foreign_packages,
    foreign_pages,
    imported,
    not_installed,
    pages_of,
    run_code,
    snippets,
    table,
    titled,
)
from torch import nn

import amp_wrapper
import amp_wrapper.ops
from amp_wrapper import AmpConfigError, AmpOptimWrapper, cli, policy, start
from amp_wrapper.policy import LEVELS, OPTIONS, dtype_name, fp32_registry, resolve

ROOT = Path(__file__).resolve().parents[2]
LINKED = [*PAGES, ROOT / 'CONTRIBUTING.md', ROOT / 'CHANGELOG.md', ROOT / 'csrc/README.md']
#: A snippet of nothing but assignments and imports, one of them to a name of these, is a config.
CONFIG_NAMES = frozenset({'optim_wrapper', 'custom_hooks', 'default_hooks', 'custom_imports', 'load_from'})


def names_of(pages: list[Path]) -> list[str]:
    return [str(page.relative_to(ROOT)) for page in pages]


def is_config(code: str) -> bool:
    body = ast.parse(code).body
    assigned = {t.id for node in body if isinstance(node, ast.Assign) for t in node.targets if isinstance(t, ast.Name)}
    return bool(assigned & CONFIG_NAMES) and all(isinstance(n, (ast.Assign, ast.Import, ast.ImportFrom)) for n in body)


class TinyDetector(nn.Module):
    """Has a module for every name that the pages use in ``keep_fp32``."""

    def __init__(self) -> None:
        super().__init__()
        self.backbone = nn.ModuleDict({'conv1': nn.Conv2d(3, 4, 3), 'norm1': nn.BatchNorm2d(4)})
        self.bbox_head = nn.ModuleDict({'fc': nn.Linear(4, 4), 'norm': nn.LayerNorm(4)})

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.backbone['norm1'](self.backbone['conv1'](x)).mean((2, 3))
        return self.bbox_head['norm'](self.bbox_head['fc'](x))


def foreign_bases() -> set[str]:
    """What the configs of this repository inherit from other projects; make test-downstream reads them all."""
    texts = [path.read_text() for path in (ROOT / 'configs').glob('mm*/*.py')]
    return {base for text in texts for base in re.findall(r"^_base_ = '(.+)'$", text, re.MULTILINE)}


def run_config(code: str) -> None:
    """Parse as mmengine does, build what can be built, and train one step."""
    bases = re.findall(r"^_base_ = '(.+::.+)'$", code, re.MULTILINE)
    assert set(bases) <= foreign_bases(), f'no config of this repository inherits from {bases}'
    cfg = Config.fromstring(re.sub(r"^_base_ = '.+::.+'$", '', code, flags=re.MULTILINE), '.py')
    if bases and 'optim_wrapper' in cfg:
        # the project's own config, which is not installed here, brings the optimizer
        cfg.optim_wrapper.setdefault('optimizer', dict(type='SGD', lr=0.01))
    # a list would replace that of the base config, and its hooks with it
    assert 'custom_hooks' not in cfg
    for hook in cfg.get('default_hooks', {}).values():
        HOOKS.build(dict(hook))
    if 'optim_wrapper' not in cfg:
        return
    model = TinyDetector()
    wrapper = build_optim_wrapper(model, cfg.optim_wrapper)
    assert isinstance(wrapper, AmpOptimWrapper)
    with wrapper.optim_context(model):
        loss = model(torch.randn(2, 3, 6, 6)).square().mean()
    wrapper.update_params(loss)
    for name, parameter in model.named_parameters():
        assert parameter.isfinite().all(), name


def run_page(text: str, name: str) -> int:
    namespace: dict = {'__name__': 'page'}
    blocks = snippets(text, 'python')
    # tests/system/test_site.py writes these files, and types the commands of their page
    files = titled(text).values()
    for line, code in blocks:
        if code in files:
            continue
        if is_config(code):
            run_config(code)
        else:
            run_code(code, namespace, f'{name}:{line}')
    return len(blocks)


@pytest.fixture(autouse=True)
def _logger_of_this_process() -> None:
    # made before doctest replaces sys.stdout, to which it would be bound
    MMLogger.get_current_instance()


def skip_what_is_foreign(text: str) -> None:
    """Pages on packages that only ``make test-foreign`` installs are run there, by the same function."""
    absent = not_installed(imported(text) & foreign_packages())
    if absent:
        pytest.skip(f'{", ".join(absent)} not installed: make test-foreign runs this page')


@pytest.mark.parametrize('name', names_of(PAGES))
def test_python_snippets_run(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if name.endswith('sharding.md'):
        skip_without_fsdp()
    text = (ROOT / name).read_text()
    skip_what_is_foreign(text)
    if ROOT / name in foreign_pages():
        # they write checkpoints
        monkeypatch.chdir(tmp_path)
    run_page(text, name)


def test_there_are_snippets_to_run() -> None:
    """A fence that the pattern above misses would be a snippet that nobody runs."""
    for page in PAGES:
        text = page.read_text()
        assert len(snippets(text, 'python')) == len(re.findall(r'^ *```python', text, re.MULTILINE)), page
        assert text.count('```') % 2 == 0, page
    counts = {page.stem: len(snippets(page.read_text(), 'python')) for page in PAGES}
    assert all(
        counts[stem] > 0 for stem in ('README', 'index', 'functional', 'opt_levels', 'migrating', 'checkpoints', 'nan')
    ), counts


def test_pages_are_skipped_for_packages_of_make_test_foreign_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr('snippets.find_spec', lambda name: None)
    with pytest.raises(pytest.skip.Exception, match='timm not installed: make test-foreign'):
        skip_what_is_foreign('```python\nimport torch\nfrom timm.optim import create_optimizer_v2\n```\n')
    skip_what_is_foreign('```python\nimport torch\nimport no_such_package\n```\n')
    assert {page.name for page in foreign_pages()} == {page.name for page in (ROOT / 'docs').glob('recipes_*.md')}


@pytest.mark.parametrize(
    'text, error',
    [
        ('```python\nprint(1 + 1)  # 3\n```\n', AssertionError),
        ('```python\nprint(1 + 1)\n```\n', AssertionError),
        ('```python\nimport amp_wrapper\namp_wrapper.amp.initialise()\n```\n', AttributeError),
        (
            "```python\noptim_wrapper = dict(type='AmpOptimWrapper', opt_level='O1', master_weights=True, "
            "optimizer=dict(type='SGD', lr=0.1))\n```\n",
            AmpConfigError,
        ),
        ('1. in a list\n\n    ```python\n    assert False\n    ```\n', AssertionError),
    ],
    ids=['wrong output', 'silent print', 'no such name', 'conflict', 'indented'],
)
def test_a_wrong_snippet_fails(text: str, error: type[Exception]) -> None:
    with pytest.raises(error):
        run_page(text, 'page.md')


# -- tables -----------------------------------------------------------------------------------------------------------


def levels_from_policy() -> list[list[str]]:
    rows = []
    for level in LEVELS:
        p = resolve(level)
        weights = 'float32' if p.cast_model_type is None else dtype_name(p.cast_model_type)
        norm = 'float32' if p.keep_batchnorm_fp32 else weights
        autocast = 'off' if p.autocast_dtype is None else dtype_name(p.autocast_dtype)
        scale = 'dynamic' if p.loss_scale.dynamic else f'{p.loss_scale.init_scale:g}'
        rows.append([level, weights, norm, autocast, 'yes' if p.master_weights else 'no', scale])
    return rows


def test_levels_of_the_readme_are_those_of_the_policy() -> None:
    rows = table((ROOT / 'README.md').read_text(), 'level')
    assert rows[0][1:6] == ['weights', 'BatchNorm', 'autocast', 'masters', 'loss scale']
    assert [row[:6] for row in rows[1:]] == levels_from_policy()
    assert all(row[6] for row in rows[1:]), 'each level says when to choose it'


def test_numbers_of_the_readme_are_those_of_the_page_on_numbers() -> None:
    """Rows in the order of the tables of that page, which a benchmark has written."""
    rows = {row[0]: dict(zip(LEVELS, row[1:])) for row in table((ROOT / 'README.md').read_text(), 'measured')[1:]}
    page = (ROOT / 'docs/numbers.md').read_text()
    found = {}
    for name, key, value in (('parts', 0, 5), ('times', 1, 4), ('xeon', 1, 4)):
        lines = page.split(f'<!-- {name}: ')[1].split(f'<!-- end of {name}')[0].splitlines()
        for cells in (
            [cell.strip(' *') for cell in line.strip('|').split('|')] for line in lines if line.startswith('|')
        ):
            if cells[key] in LEVELS:
                found[name, cells[0] if key else '', cells[key]] = cells[value]
    header, *lines = table(page.split('<!-- activations: ')[1].split('<!-- end of activations')[0], 'level')
    for place, title in enumerate(header):
        if title.endswith(': of FP32'):
            found |= {('activations', title, line[0]): line[place] for line in lines if line[0] in LEVELS}
    order = [
        ('parts', ''),
        ('activations', 'ResNet-50'),
        *((name, 'transformer') for name in ('activations', 'times', 'xeon')),
    ]
    kinds = dict(zip([words for words in rows if not words.startswith('the same with')], order))
    assert len(kinds) == 5
    header, *lines = table(page.split('<!-- adamw: ')[1].split('<!-- end of adamw')[0], 'level')
    place = header.index("`AmpOptimWrapper`, torch's `AdamW`")
    bytes_of = {line[0]: line[place] for line in lines}
    assert rows.pop("the same with torch's AdamW") == {level: bytes_of[level] for level in LEVELS}
    for words, (name, model) in kinds.items():
        expected = {level: value for (part, title, level), value in found.items() if part == name and model in title}
        assert rows[words] == expected, words


@pytest.mark.parametrize('source', ['docs/opt_levels.md', 'the docstring of amp_wrapper.policy.policy'])
def test_properties_are_those_of_the_policy(source: str) -> None:
    """The table of properties, in the page and in the docstring, which has another syntax."""
    if source.endswith('.md'):
        rows = [[cell.strip('`') for cell in row] for row in table((ROOT / source).read_text(), 'property')]
    else:
        lines = (policy.policy.__doc__ or '').splitlines()
        rows = [[cell.strip('`') for cell in line.split()] for line in lines if line.startswith(('property', '``'))]
    assert rows[0] == ['property', *LEVELS]
    found = {row[0]: dict(zip(LEVELS, row[1:])) for row in rows[1:]}
    for level in LEVELS:
        p = resolve(level)
        assert found['cast_model_type'][level] == (
            'None' if p.cast_model_type is None else dtype_name(p.cast_model_type)
        )
        assert found['patch_torch_functions'][level] == str(p.patch_torch_functions)
        for name in ('keep_batchnorm_fp32', 'master_weights'):
            # None is "does not apply", and resolves to False
            assert found[name][level].replace('None', 'False') == str(getattr(p, name))
        scale = p.loss_scale
        assert found['loss_scale'][level] == ('dynamic' if scale.dynamic else str(scale.init_scale))


def test_overrides_are_those_of_the_policy() -> None:
    rows = table((ROOT / 'docs/opt_levels.md').read_text(), 'override')
    assert len(rows) > 5
    for override, *cells in rows[1:]:
        words = ast.parse(f'f({override.strip("`")})', mode='eval').body
        assert isinstance(words, ast.Call)
        keywords = {word.arg: ast.literal_eval(word.value) for word in words.keywords}
        for levels, cell in zip(rows[0][1:], cells):
            for level in levels.split(', '):
                try:
                    resolve(level, **keywords)
                    verdict = 'ok'
                except AmpConfigError:
                    verdict = 'error'
                assert cell == verdict, f'{override} at {level} is {verdict}'


def test_defaults_of_the_arguments() -> None:
    """The second table of the page on levels names real arguments and their defaults."""
    rows = table((ROOT / 'docs/opt_levels.md').read_text(), 'argument')
    words = inspect.signature(AmpOptimWrapper).parameters
    defaults = {name: word.default for name, word in words.items()} | {
        name: option.default for name, option in OPTIONS.items()
    }
    for names, values, _ in rows[1:]:
        stated = values.replace('2²⁴', str(2.0**24)).split(', ')
        for name, value in zip(re.findall(r'`(\w+)`', names), stated, strict=True):
            assert repr(defaults[name]) == value, name


def test_the_registry_is_documented() -> None:
    """Every member, the types it avoids, its rule and its reason, grouped as the table of the code is."""

    def types(avoided: frozenset[torch.dtype]) -> str:
        return ' and '.join(sorted(dtype_name(dtype) for dtype in avoided)) or 'none'

    rules = {
        'caller': "the caller's type",
        'float32': 'float32',
        'model': "the caller's type; float32 under autocast",
    }
    # versions of torch differ in what they have of these
    algebra = set(fp32_registry.linalg_functions())
    expected = {
        name: [types(op.cpu), types(op.cuda), rules[op.output], op.reason]
        for name, op in fp32_registry.FP32_OPS.items()
        if name not in algebra
    }
    others = {name.rpartition('.')[2] for name in algebra if not name.startswith('torch.linalg.')}
    for name in others | fp32_registry.IN_16_BIT:
        assert f'`{name}`' in (ROOT / 'docs/fp32_ops.md').read_text(), name
    found = {
        name: cells
        for members, *cells in table((ROOT / 'docs/fp32_ops.md').read_text(), 'members')[1:]
        for name in re.findall(r'`([\w.]+)`', members)
    }
    assert found == expected
    for name in fp32_registry.FP32_METHODS:
        assert f'`{name}`' in (ROOT / 'docs/fp32_ops.md').read_text()


def call_of_op(name: str, dtype: torch.dtype, function: Any) -> None:
    """One call of an op, with tensors of a type in the role that its row of the table speaks of."""
    x, y = torch.ones(3, dtype=dtype), torch.zeros(3, dtype=dtype)
    one, flag = torch.ones(()), torch.zeros(())
    count, left = (torch.zeros((), dtype=torch.int32) for _ in range(2))
    decision, rows, moment = torch.zeros(8), torch.zeros(1, 12), torch.zeros(3)
    hyper, group = torch.zeros(1, 7, dtype=torch.float64), torch.zeros(1, dtype=torch.int64)
    arguments = {
        'multi_tensor_scale': ([x], [y], one, flag),
        'multi_tensor_axpby': ([x], [x.clone()], [y], one, one, flag),
        'multi_tensor_copy': ([x], [y]),
        'multi_tensor_isnonfinite': ([x], flag),
        'multi_tensor_exponents': ([x], torch.zeros(1, 257, dtype=torch.int64), flag.view(1)),
        'multi_tensor_l2norm': ([x], one, flag),
        'multi_tensor_maxnorm': ([x], one, flag),
        'multi_tensor_scale_l2norm': ([x], [y], one, flag),
        'multi_tensor_refresh': ([x], [torch.zeros(3)]),
        'update_scale': (torch.ones((), dtype=dtype), count, left, flag, 2.0, 0.5, 2000, 1),
        'step_prologue': (decision, rows.to(dtype), [flag], hyper, group, 0, [], []),
        'fused_adam': ([x], [y], [moment], [moment.clone()], [], [], rows, decision),
        'fused_sgd': ([x], [y], [], [], rows, decision),
    }
    function(*arguments[name])


def verdict_of_op(name: str, dtype: torch.dtype) -> str:
    """What the table has to say: read from the front, the kernel for the CPU, and the registrations of the CUDA kernels."""
    try:
        call_of_op(name, dtype, getattr(amp_wrapper.ops, name))
    except (ValueError, RuntimeError):
        return 'error'
    devices = []
    if amp_wrapper.ops.loader.library().module is not None:
        try:
            call_of_op(name, dtype, getattr(torch.ops.amp_wrapper, name))
            devices.append('CPU')
        except NotImplementedError:
            pass
    elif dtype in amp_wrapper.ops.COMPILED_DTYPES:
        devices.append('CPU')
    # both kinds of kernel take their types from csrc/common/lists.cpp
    if devices and name in registered('cuda'):
        devices.append('CUDA')
    return ', '.join(devices) or 'reference'


def registered(kind: str) -> set[str]:
    """Names of the ops with a kernel for a kind of device, in the sources."""
    text = ''.join(path.read_text() for path in sorted((ROOT / 'csrc' / kind).glob('*ops.cpp')))
    blocks = re.findall(
        rf'TORCH_LIBRARY_IMPL\(amp_wrapper, {kind.upper()}, library\) {{(.*?)^}}', text, re.MULTILINE | re.DOTALL
    )
    return {name for block in blocks for name in re.findall(r'library\.impl\("(\w+)"', block)}


def test_ops_of_the_page_are_those_of_the_kernels() -> None:
    text = (ROOT / 'docs/ops.md').read_text()
    # the first table says what each op computes
    head, _, rest = text.partition('<!-- ops:')
    meanings = table(head, 'op')
    rows = table(rest, 'op')
    names = [f'`{name}`' for name in amp_wrapper.ops.schemas.SCHEMAS]
    assert [row[0] for row in rows[1:]] == [row[0] for row in meanings[1:]] == names
    assert registered('cpu') == set(amp_wrapper.ops.schemas.SCHEMAS)
    for name, *cells in rows[1:]:
        found = [verdict_of_op(name.strip('`'), getattr(torch, dtype)) for dtype in rows[0][1:]]
        assert cells == found, name


def test_reasons_of_a_missing_library_are_those_of_the_code() -> None:
    """Every reason that the build or the loader can give is in the table, and no other."""
    listed = [row[0].strip('`') for row in table((ROOT / 'docs/ops.md').read_text(), 'reason')[1:]]
    files = ('setup.py', *(f'amp_wrapper/ops/{name}.py' for name in ('building', 'cuda_toolkit', 'loader')))
    code = ''.join((ROOT / name).read_text() for name in files)
    code = code.replace('{record["python"]}', sys.implementation.name)
    assert [reason for reason in listed if reason not in code] == []
    given = re.findall(
        r'(?:_missing\(|return |return None, |NO_TORCH = |reason=|without_cuda = )f?'
        r"'(th[^'{]+|no [^'{]+|a build[^'{]+|AMP[^'{]+|nvcc [^'{]+)",
        code,
    )
    assert len(given) > 10
    assert [reason for reason in given if not any(reason.startswith(known) for known in listed)] == []


def test_build_variables_of_the_page_are_those_of_the_build() -> None:
    """Those of the page are told in setup.py, and the other way round."""
    names = {
        name
        for row in table((ROOT / 'docs/ops.md').read_text(), 'variable')[1:]
        for name in re.findall(r'`([A-Z_]+)', row[0])
    }
    docstring = ast.get_docstring(ast.parse((ROOT / 'setup.py').read_text())) or ''
    assert names == set(re.findall(r'``([A-Z_]+)', docstring))


# -- links, paths, commands -------------------------------------------------------------------------------------------


def anchors(page: Path) -> set[str]:
    text = FENCE.sub('', page.read_text())
    titles = re.findall(r'^#+ (.+)$', text, re.MULTILINE)
    return {re.sub(r'[^\w\- ]', '', title.lower()).strip().replace(' ', '-') for title in titles}


def broken_links(page: Path, text: str) -> list[str]:
    bad = []
    for target in re.findall(r'\]\(([^)\s]+)\)', FENCE.sub('', text)):
        if re.match(r'[a-z]+:', target):
            continue
        file, _, anchor = target.partition('#')
        path = (page.parent / file).resolve() if file else page
        if not path.is_file() or (anchor and anchor not in anchors(path)):
            bad.append(target)
    return bad


@pytest.mark.parametrize('name', names_of(LINKED))
def test_relative_links_point_to_files(name: str) -> None:
    page = ROOT / name
    assert broken_links(page, page.read_text()) == []


def test_a_broken_link_is_found() -> None:
    page = ROOT / 'README.md'
    assert broken_links(page, '[a](docs/none.md) [b](LICENSE) [c](docs/nan.md#nowhere) [d](https://a.org)') == [
        'docs/none.md',
        'docs/nan.md#nowhere',
    ]


def test_every_page_is_in_the_navigation() -> None:
    nav = yaml.safe_load((ROOT / 'mkdocs.yml').read_text())['nav']
    listed = pages_of(nav)
    assert len(listed) == len(set(listed)), 'a page stands twice'
    assert set(listed) == {page.name for page in PAGES if page.parent.name == 'docs'}


def shell_lines(text: str) -> list[str]:
    """The commands in the shell blocks of a page; those that go on in the next line in one piece."""
    return [line for _, code in snippets(text, 'bash') for line in code.replace('\\\n', ' ').splitlines()]


def commands() -> list[list[str]]:
    """Every shell line of the pages, as words."""
    lines = [line for page in PAGES for line in shell_lines(page.read_text())]
    return [words for words in (shlex.split(line, comments=True) for line in lines) if words]


def test_commands_name_what_exists() -> None:
    """Make targets, tools, configs and their options."""
    targets = set(re.findall(r'^([\w-]+):', (ROOT / 'Makefile').read_text(), re.MULTILINE))
    seen = set()
    for words in commands():
        if words[0] == 'make':
            assert words[1] in targets, words
        if words[0] == 'python':
            words = words[1:]
        for word in words:
            if word.startswith(('tools/', 'configs/', 'examples/')):
                assert (ROOT / word).is_file(), word
                seen.add(word)
    assert {'tools/train.py', 'tools/test.py', 'configs/digits/cnn_o2.py'} <= seen
    for page in (*PAGES, ROOT / 'CONTRIBUTING.md', ROOT / 'csrc/README.md'):
        for path in re.findall(
            r'`((?:tools|configs|examples|tests|amp_wrapper|docs|requirements|csrc)/[\w./]+\.\w+)`', page.read_text()
        ):
            assert (ROOT / path).is_file(), f'{page.name}: {path}'


def status(words: list[str]) -> int:
    """Read the words of a command line with the options that the command has; returns 0, or 2 where they are wrong."""
    if words[0] in ('python', 'torchrun') and '-m' in words:
        words = ['amp-wrapper', *words[words.index('-m') + 2 :]]
    name, words = (
        (words[1], words[2:]) if words[0] == 'amp-wrapper' else (start.SCRIPTS[Path(words[1]).name], words[2:])
    )
    if name.startswith('--'):
        return 0 if name in ('--help', '--version') else 2
    try:
        cli.parser_of(name)[1].parse_args(words)
    except SystemExit as ended:
        return int(ended.code or 0)
    return 0


def is_ours(words: list[str]) -> bool:
    script = words[0] == 'python' and words[1].startswith('tools/')
    module = '-m' in words and words[words.index('-m') + 1] == 'amp_wrapper'
    return words[0] == 'amp-wrapper' or script or module


def command_lines(page: Path) -> list[list[str]]:
    """What a page says to type that is ours, in blocks and within sentences; assignments before it are left out."""
    text = page.read_text()
    lines = shell_lines(text)
    lines += [line[2:] for _, code in snippets(text, 'console') for line in code.splitlines() if line.startswith('$ ')]
    # "amp-wrapper train" alone is the name of a command
    lines += re.findall(r'`((?:amp-wrapper|python tools/)[^`\n]* --?[^`\n]+)`', FENCE.sub('', text))
    found = [re.split(r' [|>]', line)[0] for line in lines]
    words = [shlex.split(re.sub(r'^(?:\w+=\S+ )+', '', line), comments=True) for line in found]
    return [each for each in words if each and is_ours(each)]


@pytest.mark.parametrize('name', [name for name in names_of(PAGES) if command_lines(ROOT / name)])
def test_command_lines_can_be_typed(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    wrong = [f'{shlex.join(words)}: {capsys.readouterr().err}' for words in command_lines(ROOT / name) if status(words)]
    assert wrong == []


def test_a_wrong_command_line_is_found(tmp_path: Path) -> None:
    page = tmp_path / 'page.md'
    page.write_text(
        '```bash\nX=1 amp-wrapper train a.py --opt-level O9\nls\n```\n```console\n$ python tools/test.py a.py\nsaid\n```\n'
        'Type `amp-wrapper convert a.pth --too fp16`, or `amp-wrapper train`.\n'
    )
    lines = command_lines(page)
    assert [line[1] for line in lines] == ['train', 'tools/test.py', 'convert']
    for words in lines:
        assert status(words) == 2


def test_the_page_on_commands_has_all_of_them() -> None:
    """Each has its section with a table of its options, an example that can be typed, and what it prints."""
    text = (ROOT / 'docs/commands.md').read_text()
    sections = dict(
        zip(re.findall(r'^## (.+)$', text, re.MULTILINE), re.split(r'^## .+$', text, flags=re.MULTILINE)[1:])
    )
    assert [title for title in sections if title in cli.COMMANDS] == list(cli.COMMANDS)
    for name in cli.COMMANDS:
        section = sections[name]
        listed = {row[0].split()[0].strip('`') for row in table(section, 'option')[1:]}
        actions = cli.parser_of(name)[1]._actions
        known = [action for action in actions if action.help != argparse.SUPPRESS and action.dest != 'help']
        assert {(action.option_strings or [action.metavar or action.dest])[0] for action in known} == listed, name
        assert f'amp-wrapper {name}' in section and '```console' in section, name


# -- docstrings -------------------------------------------------------------------------------------------------------

MODULES = ['amp_wrapper', *(m.name for m in pkgutil.walk_packages(amp_wrapper.__path__, 'amp_wrapper.'))]


def examples_of(module: str) -> list[doctest.DocTest]:
    finder = doctest.DocTestFinder(exclude_empty=True)
    return [test for test in finder.find(importlib.import_module(module)) if test.examples]


@pytest.mark.parametrize('module', [name for name in MODULES if examples_of(name)])
def test_docstring_examples(module: str) -> None:
    for test in examples_of(module):
        report: list[str] = []
        result = doctest.DocTestRunner(optionflags=doctest.ELLIPSIS).run(test, out=report.append)
        assert result.failed == 0, ''.join(report)


def test_the_main_class_has_an_example() -> None:
    names = {test.name for test in examples_of('amp_wrapper.openmmlab.optim_wrapper')}
    assert 'amp_wrapper.openmmlab.optim_wrapper.AmpOptimWrapper' in names


def test_api_pages_name_every_public_name() -> None:
    """What ``from amp_wrapper import ...`` offers is on a page, and what is on a page exists."""
    pages = [path.read_text() for path in sorted((ROOT / 'docs').glob('api_*.md'))]
    listed = re.findall(r'^::: ([\w.]+)$', '\n'.join(pages), re.MULTILINE)
    objects = []
    for path in listed:
        module, _, name = path.rpartition('.')
        if path in MODULES:
            objects += [v for v in vars(importlib.import_module(path)).values() if getattr(v, '__module__', '') == path]
        else:
            objects.append(getattr(importlib.import_module(module), name))
    # mmengine's own class is documented by mmengine, and amp by its functions
    own = [getattr(amp_wrapper, name) for name in amp_wrapper.__all__ if name not in ('TorchAmpOptimWrapper', 'amp')]
    own += [getattr(amp_wrapper.amp, name) for name in amp_wrapper.amp.__all__]
    assert [item for item in own if item not in objects] == []
    assert issubclass(AmpOptimWrapper, OptimWrapper)
