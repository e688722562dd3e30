_loader = dict(num_workers=0, collate_fn=dict(type='default_collate'))
train_dataloader = dict(
    batch_size=64, dataset=dict(type='Digits', train=True), sampler=dict(type='DefaultSampler', shuffle=True), **_loader
)
val_dataloader = dict(
    batch_size=256,
    dataset=dict(type='Digits', train=False),
    sampler=dict(type='DefaultSampler', shuffle=False),
    **_loader,
)
test_dataloader = val_dataloader
val_evaluator = dict(type='Accuracy')
test_evaluator = val_evaluator
