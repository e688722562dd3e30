# O5 over FSDP2: weights, gradients and optimizer state are sharded over the processes
#   tools/dist_train.sh configs/digits/cnn_o5_fsdp.py 2
_base_ = ['./cnn_o5.py']

model_wrapper_cfg = dict(type='amp_wrapper.MMFullyShard')
