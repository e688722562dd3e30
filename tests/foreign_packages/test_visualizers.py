"""mmengine's visualizers for TensorBoard, MLflow and W&B: the numbers of the monitor, read back from what they wrote."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import toy

pytest.importorskip('tensorboard')
pytest.importorskip('wandb')
mlflow = pytest.importorskip('mlflow')
STEPS = [5, 10, 15, 20]


def test_numbers_of_the_monitor_arrive(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    # newer versions of mlflow keep files when asked alone
    monkeypatch.setenv('MLFLOW_ALLOW_FILE_STORE', 'true')
    monkeypatch.setenv('WANDB_SILENT', 'true')
    store = (tmp_path / 'mlruns').as_uri()
    backends = [
        dict(type='LocalVisBackend'),
        dict(type='TensorboardVisBackend'),
        dict(type='MLflowVisBackend', tracking_uri=store, exp_name='toy'),
        dict(type='WandbVisBackend', init_kwargs=dict(mode='offline', project='toy')),
    ]
    runner = toy.run(
        tmp_path,
        dict(type='AmpOptimWrapper', opt_level='O2', optimizer=dict(type='SGD', lr=0.01), verbosity=0),
        custom_hooks=[dict(type='amp_wrapper.AmpMonitorHook', interval=5)],
        default_hooks=dict(logger=dict(type='LoggerHook', interval=5)),
        train_cfg=dict(by_epoch=False, max_iters=20, val_interval=50),
        visualizer=dict(type='Visualizer', vis_backends=backends),
    )
    lines = (Path(runner.log_dir) / 'vis_data' / 'scalars.json').read_text().splitlines()
    rows = [row for row in map(json.loads, lines) if 'loss' in row]
    names = [key for key in rows[0] if key.startswith('amp_')]
    assert {'amp_scale', 'amp_skipped', 'amp_skip_rate', 'amp_grad_underflow', 'amp_update_lost'} <= set(names)
    events = EventAccumulator(str(next(tmp_path.rglob('events.out.tfevents.*')).parent))
    events.Reload()
    client = mlflow.tracking.MlflowClient(tracking_uri=store)
    (run,) = client.search_runs([client.get_experiment_by_name('toy').experiment_id])
    # a format of its own: the names alone are looked for
    written = next(tmp_path.rglob('*.wandb')).read_bytes()
    for key in names:
        wanted = [row[key] for row in rows]
        history = sorted((each.step, each.value) for each in client.get_metric_history(run.info.run_id, key))
        assert history == list(zip(STEPS, wanted, strict=True)), key
        assert [each.step for each in events.Scalars(key)] == STEPS, key
        # kept as float32
        assert [each.value for each in events.Scalars(key)] == pytest.approx(wanted, rel=1e-6), key
        assert key.encode() in written, key
