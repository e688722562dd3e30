model = dict(
    type='ImageClassifier',
    data_preprocessor=dict(type='Normalize', mean=[4.9], std=[6.0]),
    backbone=dict(type='PatchTransformer', in_channels=1, size=8, patch=2, width=64, layers=4, heads=4, dropout=0.1),
    in_channels=64,
    num_classes=10,
)
