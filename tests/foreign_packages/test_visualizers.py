"""mmengine's visualizers for TensorBoard, MLflow and W&B: the numbers of the monitor, read back from what they wrote."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import toy
from mmengine.runner import Runner

from amp_wrapper.diagnostics.measured_numbers import NUMBERS

#: Steps of the rows of the log.
STEPS = [5, 10, 15, 20]


def train(folder: Path, backend: dict[str, Any]) -> dict[str, list[float]]:
    """Train a toy with a backend; what the log itself has of each number, by name."""
    runner: Runner = toy.run(
        folder,
        dict(type='AmpOptimWrapper', opt_level='O2', optimizer=dict(type='SGD', lr=0.01), verbosity=0),
        custom_hooks=[dict(type='amp_wrapper.AmpMonitorHook', interval=5)],
        default_hooks=dict(logger=dict(type='LoggerHook', interval=5)),
        train_cfg=dict(by_epoch=False, max_iters=20, val_interval=50),
        visualizer=dict(type='Visualizer', vis_backends=[dict(type='LocalVisBackend'), backend]),
    )
    text = (Path(runner.log_dir) / 'vis_data' / 'scalars.json').read_text()
    rows = [row for row in map(json.loads, text.splitlines()) if 'loss' in row]
    assert [row['step'] for row in rows] == STEPS
    return {name: [row[name] for row in rows] for name in (*NUMBERS, 'amp_scale', 'amp_skipped')}


def test_tensorboard(tmp_path: Path) -> None:
    pytest.importorskip('tensorboard', reason='tensorboard is not installed')
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    wanted = train(tmp_path, dict(type='TensorboardVisBackend'))
    (events,) = tmp_path.rglob('events.out.tfevents.*')
    found = EventAccumulator(str(events.parent))
    found.Reload()
    for name, values in wanted.items():
        scalars = found.Scalars(name)
        assert [each.step for each in scalars] == STEPS, name
        # kept as float32
        assert [each.value for each in scalars] == pytest.approx(values, rel=1e-6), name


def test_mlflow(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip('mlflow', reason='mlflow-skinny is not installed')
    from mlflow.tracking import MlflowClient

    # newer versions keep files when asked alone
    monkeypatch.setenv('MLFLOW_ALLOW_FILE_STORE', 'true')
    store = (tmp_path / 'mlruns').as_uri()
    wanted = train(tmp_path, dict(type='MLflowVisBackend', tracking_uri=store, exp_name='toy', run_name='first'))
    client = MlflowClient(tracking_uri=store)
    experiment = client.get_experiment_by_name('toy')
    assert experiment is not None
    (run,) = client.search_runs([experiment.experiment_id])
    for name, values in wanted.items():
        found = sorted(client.get_metric_history(run.info.run_id, name), key=lambda each: each.step)
        assert [each.step for each in found] == STEPS, name
        assert [each.value for each in found] == values, name


def test_wandb(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Offline, its run file has the names. It is its own format, so the numbers are not read back."""
    pytest.importorskip('wandb', reason='wandb is not installed')
    monkeypatch.setenv('WANDB_SILENT', 'true')
    wanted = train(tmp_path, dict(type='WandbVisBackend', init_kwargs=dict(mode='offline', project='toy')))
    (written,) = tmp_path.rglob('*.wandb')
    data = written.read_bytes()
    for name in wanted:
        assert name.encode() in data, name
