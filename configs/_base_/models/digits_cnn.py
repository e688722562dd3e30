model = dict(
    type='ImageClassifier',
    data_preprocessor=dict(type='Normalize', mean=[4.9], std=[6.0]),
    backbone=dict(type='ConvNet', in_channels=1, channels=[16, 32, 64]),
    in_channels=64,
    num_classes=10,
)
