model = dict(
    type='ImageClassifier',
    data_preprocessor=dict(type='Normalize', mean=[123.675, 116.28, 103.53], std=[58.395, 57.12, 57.375]),
    backbone=dict(type='ResNet50'),
    in_channels=2048,
    num_classes=1000,
)
