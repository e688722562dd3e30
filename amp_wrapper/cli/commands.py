"""The table of commands: what each takes, and where its work is. It imports no torch, so that ``--help`` is quick."""

from __future__ import annotations

import re
from argparse import SUPPRESS, ArgumentParser, ArgumentTypeError, BooleanOptionalAction
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, NoReturn

from ..diagnostics.plot import PANELS
from ..errors import nearest

#: The name that pip installs the command under.
PROGRAM = 'amp-wrapper'
#: Those of :mod:`amp_wrapper.policy`, which imports torch.
LEVELS = ('O0', 'O1', 'O2', 'O3', 'O4', 'O5')

#: Has the commands that read configs.
MMENGINE = '..openmmlab.commands'


class Parser(ArgumentParser):
    """Names the option that a misspelt one may have been."""

    def error(self, message: str) -> NoReturn:
        """End with the usage and the error, and status 2."""
        words = message.partition('unrecognized arguments: ')[2].split()
        known = set(re.findall(r'--[a-z][a-z0-9_-]*', self.format_help()))
        super().error(message + next((nearest(word, known) for word in words if word.startswith('--')), ''))


COMMANDS: dict[str, Parser] = {}


def command(name: str, module: str, help: str, example: str, *parents: ArgumentParser) -> Callable[..., Any]:
    """Add a command to the table.

    Args:
        name: Its name; with underscores, that of the function which does the work, and returns the exit status or None for 0.
        module: Has the function. It is imported when the command runs.
        help: What the command does.
        example: Words behind the command.
        *parents: Have options that it shares with others.

    Returns:
        Adds an option, as ``add_argument`` of a parser.
    """
    prog = f'{PROGRAM} {name}'
    parser = Parser(prog=prog, description=f'{help}.', epilog=f'example: {prog} {example}', parents=parents)
    parser.set_defaults(module=module)
    COMMANDS[name] = parser
    return parser.add_argument


def whole(text: str, least: int = 0) -> int:
    """Read a whole number below 2**32, as seeds are."""
    if not text.isdecimal() or not least <= int(text) < 2**32:
        raise ArgumentTypeError(f'{text!r} must be a whole number of at least {least}, and below 2**32')
    return int(text)


def levels(text: str) -> list[str]:
    """Read levels with commas between them."""
    listed = [level.strip() for level in text.split(',')]
    if not set(listed) <= set(LEVELS):
        raise ArgumentTypeError(f'{text!r} must be some of {",".join(LEVELS)}, with commas between them')
    return listed


def python_path(text: str) -> Path:
    """Read the path of a Python file, or of a folder."""
    path = Path(text)
    if not path.is_dir() and not (path.is_file() and path.suffix == '.py'):
        raise ArgumentTypeError(f'{text!r} is neither a folder nor a file whose name ends in .py')
    return path


config = ArgumentParser(add_help=False)
add = config.add_argument
add('config', metavar='CONFIG', help='config file, text or pure Python')
add('--cfg-options', nargs='+', action='extend', metavar='KEY=VALUE', help='override entries of the config')

launcher = ArgumentParser(add_help=False)
add = launcher.add_argument
add('--work-dir', metavar='FOLDER', help='folder for what is written; default: work_dirs/<name of the config>')
add('--launcher', choices=('none', 'pytorch', 'slurm', 'mpi'), default='none', help='how processes were started')
# torchrun hands this over, under either spelling
add('--local_rank', '--local-rank', type=int, default=0, help=SUPPRESS)

files = ArgumentParser(add_help=False)
add = files.add_argument
add('--checkpoint', metavar='FILE', help='weights, a path or URL; default: load_from of the config, or its first ones')
add('--html', metavar='FILE', help='write a page that needs no network')
add('--json', metavar='FILE', help='write everything as JSON')

add = command('info', '.installation', 'print versions, devices, and whether the compiled ops run', '--json')
add('--json', action='store_true', help='print one JSON object')

add = command('train', MMENGINE, 'train a model from a config, at any level', 'cnn_o2.py --seed 1', config, launcher)
add('--resume', nargs='?', const='auto', metavar='auto|PATH', help='resume from a checkpoint; auto: from the newest')
add('--amp', action='store_true', help='O1, float16 with a dynamic loss scale, if the config says OptimWrapper')
does = 'O0 FP32, O1 autocast to float16, O2 float16 with FP32 masters, O3 float16, O4 and O5 as O1 and O2 in bfloat16'
add('--opt-level', choices=LEVELS, help=f'replace the level of the config: {does}')
add('--auto-scale-lr', action='store_true', help="scale the learning rate to the real batch size, by the config's rule")
add('--seed', type=whole, metavar='N', help='seed of all random generators')
does = 'measure gradients every N iterations, 50 without a value: the interval of AmpMonitorHook'
add('--monitor', nargs='?', const=50, type=partial(whole, least=1), metavar='N', help=does)

add = command('test', MMENGINE, 'test a checkpoint, in FP32 or at a level', 'cnn_o2.py epoch_10.pth', config, launcher)
add('checkpoint', metavar='CHECKPOINT', help='checkpoint file or URL; its weights are FP32 at every level')
add('--opt-level', choices=LEVELS, help='run the forward passes at this level; default: FP32')

add = command('migrate', '.checklist', 'list what to change in scripts and configs that use apex', 'train.py configs/')
add('paths', metavar='PATH', nargs='+', type=python_path, help='Python file or folder; status 1: there is work left')

add = command('convert', '.conversion', 'show what is in a checkpoint, or write its weights', 'epoch_10.pth --to fp16')
add('source', metavar='SRC', help='checkpoint file, or a folder of shards; read without running code from it')
add('out', metavar='OUT', nargs='?', help='file to write; default: beside SRC, epoch_10_fp16.pth')
add('--inspect', action='store_true', help='print what is in SRC; writes nothing without --to')
add('--to', choices=('fp32', 'fp16', 'bf16'), help='the type of the weights, which are all that is written')
add('--weights', choices=('average', 'trained'), help='which weights of a checkpoint with an EMA; default: average')
add('--publish', action='store_true', help='weights, fp32 without --to, with 8 digits of their SHA-256 in the name')

add = command('report', MMENGINE, 'report types, and why', 'cnn_o2.py --opt-level O5', config, files)
add('--opt-level', choices=LEVELS, help='the level to report on; default: that of the config')
add('--depth', type=whole, metavar='N', help='show modules down to this depth in the terminal; 0: the model alone')

does = 'try the levels on the model of a config, and recommend one; after Ctrl-C it prints the results so far'
add = command('suggest-level', MMENGINE, does, 'cnn_o2.py --levels O0,O2,O5', config, files)
add('--levels', type=levels, metavar='O0,O1,...', help='levels that may be recommended; default: all. O0 always runs')
add('--steps', type=int, default=20, metavar='N', help='steps of each level, at least 4, the first two not timed (20)')
add('--prefer', choices=('speed', 'memory'), default='speed', help='what to save; default: speed, on this device')
add('--seed', type=whole, default=0, metavar='N', help='seed of all random generators; default: 0')
add('--device', metavar='DEVICE', help='device to run on; default: the first GPU, or the CPU')

does = 'draw loss, gradient norm, loss scale and skipped steps of one training or several'
add = command('plot', '.plotting', does, 'work_dirs/cnn_o2 work_dirs/cnn_o5 --out levels.png --from 100')
add('logs', metavar='LOG', nargs='+', help='work dir, folder of one run, scalars.json or other JSON lines')
add('--out', metavar='FILE', default='amp_plot.png', help='file to write, .png or .svg; default: amp_plot.png here')
add('--panels', nargs='+', choices=tuple(PANELS), metavar='PANEL', help=f'of {" ".join(PANELS)}; default: all but lr')
add('--from', dest='first', type=int, metavar='N', help='first iteration')
add('--to', dest='last', type=int, metavar='N', help='last iteration')
add('--title', default='', help='title above the picture')

does = 'compile the ops for the torch that is installed; needs a C++ compiler and ninja, for CUDA nvcc'
add = command('build-ops', '.installation', does, '--no-cuda')
add('--cuda', action=BooleanOptionalAction, help='CUDA ops; default: as FORCE_CUDA says, or where torch sees a GPU')
