"""``torch.distributed`` on a virtual machine: real ranks over gloo, or one that is pretended."""
