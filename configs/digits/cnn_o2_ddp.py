# cnn_o2.py for several processes:  tools/dist_train.sh configs/digits/cnn_o2_ddp.py 2
# With tools/train.py it runs in one process, which takes no notice of model_wrapper_cfg.
_base_ = 'cnn_o2.py'

# per process
train_dataloader = dict(batch_size=32)
# each process adds up the gradients of two batches before they are averaged over the processes, once per step
optim_wrapper = dict(accumulative_counts=2)
# The learning rate was chosen for steps of 64 images. mmengine scales it by batch_size x processes / base_batch_size and
# leaves accumulation out, so base_batch_size is 64 / accumulative_counts.
auto_scale_lr = dict(enable=True, base_batch_size=32)

model_wrapper_cfg = dict(
    type='MMDistributedDataParallel',
    # each parameter takes part in each loss
    find_unused_parameters=False,
    # each process keeps the running statistics of its own batches; rank 0's are saved
    broadcast_buffers=False,
    # gradients live in the buffers that are sent, without a copy beside them
    gradient_as_bucket_view=True,
)
